#ifndef DDP_ELASTIC_CHECKPOINT_WHOLE_FILE_H_
#define DDP_ELASTIC_CHECKPOINT_WHOLE_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system.h"

namespace ddp::elastic {

// Creates the file `path` with `text` and syncs it. Errors: those of the file system; the file may
// then exist in part.
absl::Status WriteWholeFile(FileSystem& file_system, const std::string& path,
                            const std::string& text);

// Reads all of the file `path`. kDataLoss: the file has more than `bytes_max` bytes.
absl::StatusOr<std::string> ReadWholeFile(FileSystem& file_system, const std::string& path,
                                          uint64_t bytes_max);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_WHOLE_FILE_H_
