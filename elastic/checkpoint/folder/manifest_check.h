#ifndef DDP_ELASTIC_CHECKPOINT_FOLDER_MANIFEST_CHECK_H_
#define DDP_ELASTIC_CHECKPOINT_FOLDER_MANIFEST_CHECK_H_

#include "absl/status/status.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/format/safetensors_reader.h"

namespace ddp::elastic {

// Compares a file that was read with its record in `manifest`. kDataLoss names the damaged tensor,
// or the header.
absl::Status CompareFile(const Manifest& manifest, const FileRecord& record,
                         const LoadedFile& loaded);

// Returns true when a program that loads either checkpoint gets the same state.
bool HoldsTheSame(const Manifest& a, const Manifest& b);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FOLDER_MANIFEST_CHECK_H_
