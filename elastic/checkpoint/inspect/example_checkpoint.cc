#include "elastic/checkpoint/inspect/example_checkpoint.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/file_system/whole_file.h"
#include "elastic/checkpoint/format/safetensors_writer.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

template <typename T>
TensorView View(const std::string& name, Dtype dtype, std::vector<uint64_t> shape,
                const std::vector<T>& values) {
  return {name,
          {.dtype = dtype, .shape = std::move(shape)},
          reinterpret_cast<const char*>(values.data()),
          values.size() * sizeof(T)};
}

void WriteFile(FileSystem& file_system, const std::string& folder, const std::string& name,
               const std::vector<TensorView>& tensors, Manifest& manifest) {
  const absl::StatusOr<WrittenFile> written =
      WriteSafetensors(file_system, absl::StrCat(folder, "/", name), tensors);
  ASSERT_TRUE(written.ok()) << written.status();
  manifest.files.push_back({name, written->bytes, written->hash});
  for (const WrittenTensor& tensor : written->tensors) {
    manifest.tensors.push_back(
        {tensor.name, name, tensor.type, tensor.offset, tensor.bytes, tensor.hash});
  }
}

Manifest Describe(const ExampleCheckpoint& example) {
  Manifest manifest;
  manifest.id = example.id;
  manifest.epoch = 2;
  manifest.world_size = 4;
  manifest.run_id = example.run_id;
  manifest.generation_nonce = "abc";
  manifest.torch_version = "2.15.0";
  manifest.saved_unix_seconds = example.saved_unix_seconds;
  manifest.sampler = SamplerState{};
  manifest.sampler->dataset_size = 60000;
  manifest.sampler->global_batch_size = 64;
  manifest.sampler->cursor = 1280;
  manifest.optimizer =
      OptimizerRecord{.type = "SGD",
                      .groups = {{.parameters = {"fc.weight", "fc.bias"},
                                  .options = {{"lr", example.learning_rate}, {"nesterov", false}}}},
                      .steps = {}};
  manifest.aliases = {{"head.weight", "fc.weight"}};
  return manifest;
}

}  // namespace

std::string WriteExample(FileSystem& file_system, const std::string& root,
                         const ExampleCheckpoint& example) {
  const std::string folder = absl::StrCat(
      root, "/", example.folder_name.empty() ? FolderName(example.id) : example.folder_name);
  EXPECT_TRUE(file_system.MakeDirectory(folder).ok());
  const std::vector<int64_t> count = {example.count};
  const std::vector<float> momentum(6, 0.25F);
  const std::vector<uint8_t> generator = {1, 2, 3, 4};
  Manifest manifest = Describe(example);
  WriteFile(file_system, folder, "extra-00000.safetensors",
            {View("rng.cpu.0", Dtype::kU8, {4}, generator)}, manifest);
  WriteFile(file_system, folder, "model-00001-of-00002.safetensors",
            {View("fc.weight", Dtype::kF32, {2, 3}, example.weight),
             View("fc.bias", Dtype::kF32, {2}, example.bias)},
            manifest);
  WriteFile(file_system, folder, "model-00002-of-00002.safetensors",
            {View("count", Dtype::kI64, {}, count)}, manifest);
  WriteFile(file_system, folder, "optimizer-00001-of-00001.safetensors",
            {View("state.fc.weight.momentum_buffer", Dtype::kF32, {2, 3}, momentum)}, manifest);
  std::vector<TensorRecord> state;
  std::copy_if(manifest.tensors.begin(), manifest.tensors.end(), std::back_inserter(state),
               [](const TensorRecord& tensor) { return !absl::StartsWith(tensor.file, "extra-"); });
  manifest.state_hash = StateHash(state);
  EXPECT_TRUE(WriteWholeFile(file_system, absl::StrCat(folder, "/", kManifestName),
                             EncodeManifest(manifest))
                  .ok());
  EXPECT_TRUE(file_system.SyncDirectory(folder).ok());
  EXPECT_TRUE(file_system.SyncDirectory(root).ok());
  return folder;
}

void RewriteManifest(FileSystem& file_system, const std::string& folder,
                     const std::function<void(Manifest&)>& change) {
  const std::string path = absl::StrCat(folder, "/", kManifestName);
  const absl::StatusOr<std::string> text = ReadWholeFile(file_system, path, 1 << 20);
  ASSERT_TRUE(text.ok()) << text.status();
  absl::StatusOr<Manifest> manifest = ParseManifest(*text);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  change(*manifest);
  ASSERT_TRUE(file_system.RemoveFile(path).ok());
  ASSERT_TRUE(WriteWholeFile(file_system, path, EncodeManifest(*manifest)).ok());
}

}  // namespace ddp::elastic
