// Damages the newer of two checkpoints on a real disk, in thousands of ways, and counts how often a
// load finds the damage and takes the older checkpoint instead.
//
//   bazel run -c opt //elastic/checkpoint/save_load:damage_benchmark
//
// Every damage is one of six kinds, at a place that the seed draws. The program ends with 1 when a
// load takes a damaged checkpoint, or fails where the older one was there to load.

#include <gflags/gflags.h>
#include <glog/logging.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "elastic/checkpoint/file_system/posix_file_system.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/format/checkpoint_id.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/format/tensor_view.h"
#include "elastic/checkpoint/group/checkpoint_group.h"
#include "elastic/checkpoint/save_load/load_checkpoint.h"
#include "elastic/checkpoint/save_load/save_checkpoint.h"

DEFINE_int32(damages, 20000, "how many, one after the other");
DEFINE_uint64(seed, 1, "of the places and the tensors");
DEFINE_string(folder, "", "on the disk to use, new or empty; default: a temporary folder");

namespace ddp::elastic {
namespace {

namespace fs = std::filesystem;

constexpr const char* kKinds[] = {"a flipped bit", "a block of zeros", "a shorter file",
                                  "a longer file", "a missing file",   "an older file"};
constexpr int kKindCount = 6;
constexpr int kTensors = 8;
constexpr uint64_t kElements = 1024;  // of a tensor, of 4 bytes each
constexpr uint64_t kFileBytes = 3 * 4 * kElements;

[[noreturn]] void Die(const std::string& why) {
  fprintf(stderr, "damage_benchmark: %s\n", why.c_str());
  exit(1);
}

std::string ContentOf(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) Die("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(stream), {}};
}

void Write(const fs::path& path, const std::string& content) {
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(content.data(), static_cast<std::streamsize>(content.size()));
  if (!stream.flush()) Die("cannot write " + path.string());
}

struct NamedFile {
  std::string name;
  std::string whole;  // the content as it was saved
  std::string older;  // the content of the same file in the older checkpoint
};

// The folder with two checkpoints, the newer one of which is damaged.
class Checkpoints {
 public:
  explicit Checkpoints(const std::string& root)
      : file_system_(root), storage_(&file_system_, root), random_(FLAGS_seed) {
    for (const int64_t step : {1, 2}) Save(step);
    newer_ = fs::path(root) / FolderName({2, 1});
    for (const fs::directory_entry& entry : fs::directory_iterator(newer_)) {
      const std::string name = entry.path().filename();
      const fs::path older = fs::path(root) / FolderName({1, 1}) / name;
      files_.push_back({name, ContentOf(entry.path()), ContentOf(older)});
    }
    if (LoadedStep() != 2) Die("the checkpoint cannot be loaded before it is damaged");
  }

  size_t files() const { return files_.size(); }
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const NamedFile& file : files_) sum += file.whole.size();
    return sum;
  }

  // Damages a file, loads, and repairs the file. Returns true when the load took the older
  // checkpoint.
  bool FindsDamage(int kind) {
    const NamedFile& file = files_[Draw(files_.size())];
    const fs::path path = newer_ / file.name;
    if (kind == 4) {
      fs::remove(path);
    } else {
      Write(path, Damaged(file, kind));
    }
    const int64_t step = LoadedStep();
    Write(path, file.whole);
    if (step == 1) return true;
    printf("NOT FOUND: %s of %s (step %ld was loaded)\n", kKinds[kind], file.name.c_str(), step);
    return false;
  }

 private:
  uint64_t Draw(uint64_t count) {
    return std::uniform_int_distribution<uint64_t>(0, count - 1)(random_);
  }

  // Returns another content for `file`.
  std::string Damaged(const NamedFile& file, int kind) {
    std::string content = file.whole;
    while (content == file.whole) Damage(kind, file, content);
    return content;
  }

  void Damage(int kind, const NamedFile& file, std::string& content) {
    const uint64_t place = Draw(content.size());
    switch (kind) {
      case 0:
        content[place] ^= static_cast<char>(1 << Draw(8));
        break;
      case 1:
        std::fill_n(content.begin() + static_cast<int64_t>(place), 1 + Draw(content.size() - place),
                    '\0');
        break;
      case 2:
        content.resize(place);
        break;
      case 3:
        content.append(1 + Draw(4096), static_cast<char>(Draw(256)));
        break;
      default:
        content = file.older;
    }
  }

  void Save(int64_t step) {
    CheckpointContents contents;
    contents.description.id = {step, 1};
    contents.description.run_id = "damage";
    std::vector<std::string> values(2 * kTensors + 1);
    for (size_t i = 0; i < values.size(); ++i) {
      for (uint64_t byte = 0; byte < 4 * kElements; ++byte) {
        values[i].push_back(static_cast<char>(random_()));
      }
      const TensorView view = {absl::StrCat("tensor.", i),
                               {Dtype::kF32, {kElements}},
                               values[i].data(),
                               values[i].size()};
      (i < kTensors       ? contents.parameters
       : i < 2 * kTensors ? contents.optimizer
                          : contents.extra)
          .push_back(view);
    }
    SoloGroup group;
    const auto saved =
        SaveCheckpoint(file_system_, storage_, group,
                       {.owner = {"damage", 1, "nonce"}, .file_bytes_max = kFileBytes}, contents);
    if (!saved.ok()) Die(std::string(saved.status().message()));
  }

  // Returns the step of the checkpoint that a restore takes; -1: it takes none.
  int64_t LoadedStep() {
    SoloGroup group;
    const auto fits = [](const Manifest&) { return std::vector<std::string>(); };
    const auto loaded =
        LoadNewestCheckpoint(storage_, group, fits, {.pause = [](absl::Duration) {}});
    return loaded.ok() && loaded->has_value() ? (*loaded)->manifest.id.step : -1;
  }

  PosixFileSystem file_system_;
  CheckpointStorage storage_;
  std::mt19937_64 random_;
  fs::path newer_;
  std::vector<NamedFile> files_;
};

int Run() {
  if (FLAGS_damages < 1) Die(absl::StrCat("--damages=", FLAGS_damages, ": from 1"));
  std::string root = FLAGS_folder;
  if (root.empty()) {
    root = (fs::temp_directory_path() / "ddp-damage.XXXXXX").string();
    if (mkdtemp(root.data()) == nullptr) Die("cannot make " + root);
  }
  int damages[kKindCount] = {}, found[kKindCount] = {}, missed = 0;
  Checkpoints checkpoints(root + "/checkpoints");
  for (int i = 0; i < FLAGS_damages; ++i) {
    const int kind = i % kKindCount;
    ++damages[kind];
    checkpoints.FindsDamage(kind) ? ++found[kind] : ++missed;
  }
  printf("%d damages of a checkpoint of %zu files, %lu bytes: %d found\n", FLAGS_damages,
         checkpoints.files(), checkpoints.bytes(), FLAGS_damages - missed);
  for (int kind = 0; kind < kKindCount; ++kind) {
    printf("  %-18s %6d damages, %6d found\n", kKinds[kind], damages[kind], found[kind]);
  }
  if (FLAGS_folder.empty()) fs::remove_all(root);
  return missed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ddp::elastic

int main(int argc, char** argv) {
  gflags::SetUsageMessage("damages checkpoints and counts how often that is found");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  FLAGS_minloglevel = google::GLOG_FATAL;  // every passed-over checkpoint is logged
  google::InitGoogleLogging(argv[0]);
  return ddp::elastic::Run();
}
