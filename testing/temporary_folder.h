#ifndef DDP_TESTING_TEMPORARY_FOLDER_H_
#define DDP_TESTING_TEMPORARY_FOLDER_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>
#include <system_error>

namespace ddp::testing {

// A folder for one test, with mode 0700. The destructor removes the folder and all that is in it,
// and follows no symbolic link.
//
// The folder is in /tmp and not in ::testing::TempDir(): the path of a unix socket in the folder
// has to fit into 107 bytes.
class TemporaryFolder {
 public:
  TemporaryFolder() { EXPECT_NE(::mkdtemp(path_.data()), nullptr) << path_; }
  ~TemporaryFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
    EXPECT_FALSE(error) << path_ << ": " << error.message();
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/ddp_test_XXXXXX";
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_TEMPORARY_FOLDER_H_
