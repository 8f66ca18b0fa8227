#ifndef DDP_ELASTIC_CHECKPOINT_INSPECT_EXAMPLE_CHECKPOINT_H_
#define DDP_ELASTIC_CHECKPOINT_INSPECT_EXAMPLE_CHECKPOINT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/format/manifest.h"

namespace ddp::elastic {

// Writes small checkpoints for tests of the tools, without a job. One of them has:
// - model-00001-of-00002.safetensors: F32 fc.weight [2, 3] and fc.bias [2]
// - model-00002-of-00002.safetensors: I64 count []
// - optimizer-00001-of-00001.safetensors: F32 state.fc.weight.momentum_buffer [2, 3]
// - extra-00000.safetensors: U8 rng.cpu.0 [4]
struct ExampleCheckpoint {
  CheckpointId id{.step = 1200, .generation = 7};
  std::vector<float> weight = {1, 2, 3, 4, 5, 6};
  std::vector<float> bias = {0.5, -0.5};
  int64_t count = 3;
  double learning_rate = 0.1;
  std::string run_id = "digits";
  int64_t saved_unix_seconds = 1'000'000;
  std::string folder_name;  // empty: the name of `id`
};

// Writes `example` into the existing folder `root`, and returns its folder. An error fails the
// test.
std::string WriteExample(FileSystem& file_system, const std::string& root,
                         const ExampleCheckpoint& example = {});

// Changes the manifest of the checkpoint in `folder`, and writes it with a hash that fits.
void RewriteManifest(FileSystem& file_system, const std::string& folder,
                     const std::function<void(Manifest&)>& change);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_INSPECT_EXAMPLE_CHECKPOINT_H_
