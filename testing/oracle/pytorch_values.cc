#include "testing/oracle/pytorch_values.h"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

#include "elastic/checkpoint/file_system/posix_file_system.h"
#include "elastic/checkpoint/format/safetensors_reader.h"
#include "elastic/checkpoint/format/tensor_view.h"

namespace ddp::testing {

namespace {

constexpr char kFolder[] = "testing/oracle/";

template <typename Float>
std::vector<double> Widened(const elastic::TensorView& view) {
  std::vector<Float> values(view.bytes / sizeof(Float));
  std::memcpy(values.data(), view.data, view.bytes);
  return {values.begin(), values.end()};
}

}  // namespace

bool HasFreshValues() { return std::getenv("DDP_ORACLE_DIRECTORY") != nullptr; }

nlohmann::json ReadOracleTable(const std::string& name) {
  std::ifstream file(kFolder + name);
  return nlohmann::json::parse(file);
}

std::map<std::string, std::vector<double>> ReadPyTorchValues(const std::string& name) {
  const char* fresh = std::getenv("DDP_ORACLE_DIRECTORY");
  const std::string folder = fresh != nullptr ? fresh : std::string(kFolder) + "golden";
  elastic::PosixFileSystem files;
  std::map<std::string, std::vector<double>> values;
  const auto opened = files.OpenFile(folder + "/" + name);
  if (!opened.ok()) return values;
  const auto loaded = elastic::LoadSafetensors(**opened, name);
  if (!loaded.ok()) return values;
  for (const elastic::TensorView& view : loaded->tensors) {
    if (view.type.dtype == elastic::Dtype::kF64) values[view.name] = Widened<double>(view);
    if (view.type.dtype == elastic::Dtype::kF32) values[view.name] = Widened<float>(view);
  }
  return values;
}

}  // namespace ddp::testing
