#ifndef DDP_MODEL_AGREEMENT_H_
#define DDP_MODEL_AGREEMENT_H_

#include <string>

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

class ModelMetadata;

// Compares the ranks' metadata. Collective. One small all-reduce compares a hash. When hashes
// differ, the ranks exchange the whole texts over the store. Then every rank throws
// ConfigurationError with the same text, which names the first difference.
//
// `about` says what the metadata describe, for the message. The same on all ranks that compare the
// same; another text counts as another collective.
void AgreeOnModel(ProcessGroup& group, const ModelMetadata& metadata,
                  const std::string& about = "models");

}  // namespace ddp::internal

#endif  // DDP_MODEL_AGREEMENT_H_
