#ifndef DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_WHOLE_FILE_H_
#define DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_WHOLE_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system/file_system.h"

namespace ddp::elastic {

// Creates the file `path` with `text` and syncs the file. Errors: those of the file system. After
// an error the file may exist in part.
absl::Status WriteWholeFile(FileSystem& file_system, const std::string& path,
                            const std::string& text);

// Returns all of the file `path`. Errors: kDataLoss when the file has more than `bytes_max` bytes;
// those of the file system.
absl::StatusOr<std::string> ReadWholeFile(FileSystem& file_system, const std::string& path,
                                          uint64_t bytes_max);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_WHOLE_FILE_H_
