#ifndef DDP_WRAPPER_MODEL_AGREEMENT_H_
#define DDP_WRAPPER_MODEL_AGREEMENT_H_

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
// `about` says what the metadata describe, for the message. A string literal. `change` describes
// the change of a parameter that leads to the comparison: ranks without a change show it in their
// error.
void AgreeOnModel(ProcessGroup& group, const ModelMetadata& metadata, const char* about = "models",
                  const std::string& change = "");

}  // namespace ddp::internal

#endif  // DDP_WRAPPER_MODEL_AGREEMENT_H_
