#ifndef DDP_TESTING_JOBS_CHECKPOINT_FILES_H_
#define DDP_TESTING_JOBS_CHECKPOINT_FILES_H_

#include <filesystem>
#include <map>
#include <string>

namespace ddp::testing {

// Returns the newest checkpoint in a job's folder; empty: there is none.
std::filesystem::path NewestCheckpoint(const std::filesystem::path& folder);

// Returns the contents of the newest checkpoint's .safetensors files, by name.
std::map<std::string, std::string> NewestTensors(const std::filesystem::path& folder);

}  // namespace ddp::testing

#endif  // DDP_TESTING_JOBS_CHECKPOINT_FILES_H_
