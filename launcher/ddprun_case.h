// What tests of the real ddprun have in common beside DdprunDriver. For tests only.
#ifndef DDP_LAUNCHER_DDPRUN_CASE_H_
#define DDP_LAUNCHER_DDPRUN_CASE_H_

#include <filesystem>
#include <string>
#include <vector>

namespace ddp::launcher {

// Flags, then `sh -c script` as the program.
std::vector<std::string> Shell(std::vector<std::string> flags, const std::string& script);

// The lines of `text` that are not empty.
std::vector<std::string> Lines(const std::string& text);

// A whole file; empty where there is none.
std::string Slurp(const std::filesystem::path& path);

// The folder `<run id>_<random>` of the only run under `log_dir`.
std::filesystem::path RunFolder(const std::string& log_dir);

// A folder for one test, gone at its end.
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

#endif  // DDP_LAUNCHER_DDPRUN_CASE_H_
