// Compares our optimizers with PyTorch's: the table optimizers.json, run by optimizers.py there and
// here. See README.md.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "testing/oracle/pytorch_values.h"
#include "train/optim/elementwise.h"
#include "train/optim/fused_adam.h"
#include "train/optim/layerwise.h"

namespace ddp::testing {
namespace {

using Json = nlohmann::json;
using Shapes = std::vector<std::vector<int64_t>>;

constexpr int kSteps = 100;

const std::vector<std::pair<std::string, Shapes>>& Models() {
  static const auto& models = *new std::vector<std::pair<std::string, Shapes>>{
      {"vectors", {{7}, {1}, {33}}},
      {"linear", {{6, 5}, {6}, {3, 6}, {5, 9}}},
      {"conv", {{4, 3, 3, 3}, {4}, {2, 4}}},
  };
  return models;
}

// Numbers from -0.5 to 0.499, as optimizers.py has them.
torch::Tensor Noise(const std::vector<int64_t>& shape, int64_t salt, torch::Dtype dtype) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  const auto numbers = (torch::arange(count, torch::kInt64) * 7919 + salt * 104729) % 1000;
  return (numbers.to(torch::kFloat64) / 1000 - 0.5).to(dtype).reshape(shape);
}

// Sets the options that the table names.
struct FromTable {
  const Json& table;

  template <typename T>
  void operator()(const char* name, T& field) const {
    if (table.contains(name)) Set(table[name], field);
  }

  template <typename T>
  static void Set(const Json& value, T& field) {
    field = value.get<T>();
  }
  static void Set(const Json& value, std::optional<double>& field) { field = value.get<double>(); }
};

template <typename Optimizer, typename Options>
std::unique_ptr<torch::optim::Optimizer> Make(const std::vector<torch::Tensor>& parameters,
                                              const Json& table) {
  Options options;
  options.ForEachField(FromTable{table});
  return std::make_unique<Optimizer>(parameters, options);
}

template <typename Optimizer, typename Options>
std::unique_ptr<torch::optim::Optimizer> MakeFused(const std::vector<torch::Tensor>& parameters,
                                                   const Json& table) {
  Options options;
  const FromTable from{table};
  from("lr", options.lr());
  from("betas", options.betas());
  from("eps", options.eps());
  from("weight_decay", options.weight_decay());
  from("amsgrad", options.amsgrad());
  return std::make_unique<Optimizer>(parameters, options);
}

std::unique_ptr<torch::optim::Optimizer> OptimizerOf(const Json& run,
                                                     const std::vector<torch::Tensor>& parameters) {
  const std::string name = run["optimizer"];
  const Json& table = run["options"];
  if (name == "Adam") {
    return MakeFused<train::FusedAdam, torch::optim::AdamOptions>(parameters, table);
  }
  if (name == "AdamW") {
    return MakeFused<train::FusedAdamW, torch::optim::AdamWOptions>(parameters, table);
  }
  if (name == "NAdam") return Make<train::NAdam, train::NAdamOptions>(parameters, table);
  if (name == "RAdam") return Make<train::RAdam, train::RAdamOptions>(parameters, table);
  if (name == "Adamax") return Make<train::Adamax, train::AdamaxOptions>(parameters, table);
  if (name == "SparseAdam") {
    return Make<train::SparseAdam, train::SparseAdamOptions>(parameters, table);
  }
  if (name == "Adadelta") return Make<train::Adadelta, train::AdadeltaOptions>(parameters, table);
  if (name == "Adafactor") {
    return Make<train::Adafactor, train::AdafactorOptions>(parameters, table);
  }
  if (name == "Muon") return Make<train::Muon, train::MuonOptions>(parameters, table);
  if (name == "LAMB") return Make<train::LAMB, train::LAMBOptions>(parameters, table);
  return Make<train::LARS, train::LARSOptions>(parameters, table);
}

// Returns a new optimizer with the state of `optimizer`, as after a restart.
std::unique_ptr<torch::optim::Optimizer> Restarted(const Json& run,
                                                   const std::vector<torch::Tensor>& parameters,
                                                   const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive out;
  optimizer.save(out);
  std::stringstream file;
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  auto fresh = OptimizerOf(run, parameters);
  fresh->load(in);
  return fresh;
}

std::vector<torch::Tensor> Trained(const Json& run, const Shapes& shapes) {
  const auto dtype = run.value("dtype", "float64") == "float32" ? torch::kFloat32 : torch::kFloat64;
  std::vector<torch::Tensor> parameters;
  for (const auto& shape : shapes) {
    if (run["optimizer"] == "Muon" && shape.size() != 2) continue;
    parameters.push_back(Noise(shape, 1000 + static_cast<int64_t>(parameters.size()), dtype));
  }
  if (parameters.empty()) return {};
  auto optimizer = OptimizerOf(run, parameters);
  for (int step = 0; step < kSteps; ++step) {
    if (step == kSteps / 2) optimizer = Restarted(run, parameters, *optimizer);
    for (size_t i = 0; i < parameters.size(); ++i) {
      torch::Tensor& parameter = parameters[i];
      const auto noise = Noise(parameter.sizes().vec(), 10 * step + static_cast<int64_t>(i), dtype);
      parameter.mutable_grad() = noise.add(parameter, 0.1);
      if (run["optimizer"] == "SparseAdam") {
        const auto rows = torch::arange(step % 2, parameter.size(0), 2, torch::kInt64);
        parameter.mutable_grad() = torch::sparse_coo_tensor(
            rows.unsqueeze(0), parameter.grad().index_select(0, rows), parameter.sizes());
      }
    }
    optimizer->step();
  }
  return parameters;
}

// Largest difference, relative to the tensor's largest element. Muon multiplies in bfloat16, whose
// rounding depends on the processor.
double BoundOf(const Json& run) {
  return run["optimizer"] == "Muon" && !HasFreshValues() ? 1e-2 : 1e-6;
}

TEST(OptimizerTest, ParametersAreThoseOfPyTorch) {
  torch::set_num_threads(1);
  const auto theirs = ReadPyTorchValues("optimizers.safetensors");
  const Json runs = ReadOracleTable("optimizers.json");
  size_t compared = 0;
  for (const Json& run : runs) {
    for (const auto& [model, shapes] : Models()) {
      const auto parameters = Trained(run, shapes);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const std::string name =
            run["name"].get<std::string>() + "/" + model + "/" + std::to_string(i);
        ASSERT_TRUE(theirs.contains(name)) << name;
        const auto expected = torch::tensor(theirs.at(name), torch::kFloat64);
        const auto ours = parameters[i].to(torch::kFloat64).flatten();
        ASSERT_EQ(ours.numel(), expected.numel()) << name;
        const double difference = (ours - expected).abs().max().item<double>();
        EXPECT_LE(difference, BoundOf(run) * expected.abs().max().item<double>()) << name;
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, theirs.size());
}

}  // namespace
}  // namespace ddp::testing
