#include "testing/jobs/checkpoint_files.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace ddp::testing {

namespace fs = std::filesystem;

fs::path NewestCheckpoint(const fs::path& folder) {
  fs::path newest;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory()) newest = std::max(newest, entry.path());
  }
  return newest;
}

std::map<std::string, std::string> NewestTensors(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(NewestCheckpoint(folder))) {
    if (entry.path().extension() != ".safetensors") continue;
    std::ostringstream bytes;
    bytes << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    files[entry.path().filename()] = bytes.str();
  }
  return files;
}

}  // namespace ddp::testing
