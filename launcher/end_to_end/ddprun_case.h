// Helpers that tests of the real ddprun use beside DdprunDriver. For tests only.
#ifndef DDP_LAUNCHER_END_TO_END_DDPRUN_CASE_H_
#define DDP_LAUNCHER_END_TO_END_DDPRUN_CASE_H_

#include <filesystem>
#include <string>
#include <vector>

namespace ddp::launcher {

// Returns `flags` followed by `sh -c script` as the program.
std::vector<std::string> Shell(std::vector<std::string> flags, const std::string& script);

// Returns the non-empty lines of `text`.
std::vector<std::string> Lines(const std::string& text);

// Returns the contents of a file; empty when it does not exist.
std::string Slurp(const std::filesystem::path& path);

// Returns the folder `<run id>_<random>` of the only run under `log_dir`.
std::filesystem::path RunFolder(const std::string& log_dir);

// Temporary folder of one test; the destructor removes it.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_END_TO_END_DDPRUN_CASE_H_
