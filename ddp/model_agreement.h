#ifndef DDP_MODEL_AGREEMENT_H_
#define DDP_MODEL_AGREEMENT_H_

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

class ModelMetadata;

// Compares the ranks' metadata: one small all-reduce of a hash, and only where that shows a
// difference the whole texts, over the store. Then throws ConfigurationError on every rank, with
// the same text, which names the first difference. A collective.
//
// `about` says what the metadata describe, for the message: a literal.
void AgreeOnModel(ProcessGroup& group, const ModelMetadata& metadata, const char* about = "models");

}  // namespace ddp::internal

#endif  // DDP_MODEL_AGREEMENT_H_
