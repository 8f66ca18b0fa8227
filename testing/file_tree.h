#ifndef DDP_TESTING_FILE_TREE_H_
#define DDP_TESTING_FILE_TREE_H_

#include <filesystem>
#include <fstream>
#include <string>

#include "testing/temporary_folder.h"

namespace ddp::testing {

// A folder for one test that stands for the root of a file system.
class FileTree {
 public:
  const std::string& root() const { return folder_.path(); }

  // Writes `text` to the file at `path` below the root, with its folders.
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path whole = root() + "/" + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }

 private:
  TemporaryFolder folder_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_FILE_TREE_H_
