#ifndef DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_TEST_PROCESS_H_
#define DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_TEST_PROCESS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/folder/checkpoint_owner.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/folder/retention_sweep.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/format/tensor_view.h"
#include "elastic/checkpoint/group/checkpoint_group.h"
#include "elastic/checkpoint/save_load/load_checkpoint.h"
#include "elastic/checkpoint/save_load/save_checkpoint.h"
#include "gtest/gtest.h"

namespace ddp::elastic {

// The folder of the checkpoints that the tests save and load.
inline constexpr char kRoot[] = "/jobs/digits";

// A small training state. Its values depend on the step and the rank.
struct TestState {
  explicit TestState(int64_t step, int rank = 0)
      : step(step),
        weight(absl::StrCat("weight of step ", 1000 + step)),
        moment(absl::StrCat("moment of step ", 1000 + step)),
        rng(absl::StrCat("rng of rank ", rank, " at step ", 1000 + step)) {}

  // Returns views of this state, which must outlive them.
  CheckpointContents Contents(uint64_t generation) const {
    CheckpointContents contents;
    contents.description.id = {step, generation};
    contents.description.epoch = step / 10;
    contents.description.run_id = "digits";
    contents.parameters = {View("fc.weight", weight)};
    contents.buffers = {View("bn.mean", rng)};  // differs between ranks; rank 0's is saved
    contents.optimizer = {View("state.fc.weight.exp_avg", moment)};
    contents.extra = {View("rng.cpu", rng)};
    return contents;
  }

  static TensorView View(const std::string& name, const std::string& bytes) {
    return {name, {Dtype::kU8, {bytes.size()}}, bytes.data(), bytes.size()};
  }

  int64_t step;
  std::string weight;
  std::string moment;
  std::string rng;
};

// Returns the bytes of the tensor `name`; "none" when there is no such tensor.
inline std::string Text(const std::map<std::string, TensorView>& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) return "none";
  return std::string(found->second.data, found->second.bytes);
}

inline std::vector<std::string> FitsAlways(const Manifest&) { return {}; }

// Returns options for retries without pauses.
inline LoadOptions AtOnce() {
  return {.pause = [](absl::Duration) {}};
}

inline CheckpointOwner Owner(uint64_t generation) {
  return {"digits", generation, absl::StrCat("nonce", generation)};
}

// A TestProcess is the only process of one generation. Its saves and loads are those of a world of
// one rank. The caller owns `file_system`, which must outlive this. Thread-compatible.
class TestProcess {
 public:
  // Without `retention` no checkpoint is removed.
  TestProcess(FileSystem* file_system, uint64_t generation,
              const std::optional<RetentionPolicy>& retention = std::nullopt)
      : file_system_(file_system), storage_(file_system, kRoot), generation_(generation) {
    if (retention.has_value()) sweep_.emplace(&storage_, *retention);
  }

  absl::StatusOr<std::string> Save(int64_t step) {
    SoloGroup group;
    SaveOptions options = {.owner = Owner(generation_)};
    if (sweep_.has_value()) {
      options.after_commit = [this, &options](const CheckpointId& id) {
        sweep_->AfterCommit(options.owner, id);
      };
    }
    return SaveCheckpoint(*file_system_, storage_, group, options,
                          TestState(step).Contents(generation_));
  }

  absl::StatusOr<std::optional<LoadedCheckpoint>> Load() {
    SoloGroup group;
    return LoadNewestCheckpoint(storage_, group, FitsAlways, AtOnce());
  }

  // Loads the newest checkpoint, checks its values, and returns its step; -1: there is none.
  int64_t LoadedStep() {
    absl::StatusOr<std::optional<LoadedCheckpoint>> loaded = Load();
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (!loaded.ok() || !loaded->has_value()) return -1;
    const LoadedCheckpoint& checkpoint = **loaded;
    const TestState state(checkpoint.manifest.id.step);
    EXPECT_EQ(Text(checkpoint.model, "fc.weight"), state.weight);
    EXPECT_EQ(Text(checkpoint.model, "bn.mean"), state.rng);
    EXPECT_EQ(Text(checkpoint.optimizer, "state.fc.weight.exp_avg"), state.moment);
    EXPECT_EQ(Text(checkpoint.extra, "rng.cpu"), state.rng);
    EXPECT_EQ(checkpoint.manifest.epoch, state.step / 10);
    return checkpoint.manifest.id.step;
  }

 private:
  FileSystem* const file_system_;
  CheckpointStorage storage_;
  std::optional<RetentionSweep> sweep_;
  const uint64_t generation_;
};

// Returns the names of the entries of kRoot.
inline std::vector<std::string> Names(FileSystem& file_system) {
  return *file_system.ListDirectory(kRoot);
}

inline bool Exists(FileSystem& file_system, const std::string& path) {
  return file_system.KindOf(path).ok();
}

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_TEST_PROCESS_H_
