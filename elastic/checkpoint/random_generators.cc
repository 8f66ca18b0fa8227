#include "elastic/checkpoint/random_generators.h"

#include <mutex>
#include <string>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ddp/common/logging.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/manifest.h"

namespace ddp::elastic {
namespace {

// A random generator of the rank and its kind, from which RngName() makes the name of its state.
struct NamedGenerator {
  std::string kind;  // "cpu", or LibTorch's name of the accelerator, such as "cuda"
  at::Generator generator;
};

// Returns the generators of this process: the CPU's and, with an accelerator, its current
// device's.
std::vector<NamedGenerator> Generators() {
  std::vector<NamedGenerator> generators = {{"cpu", at::detail::getDefaultCPUGenerator()}};
  if (const auto type = at::getAccelerator()) {
    const c10::impl::VirtualGuardImpl guard(*type);
    generators.push_back({c10::DeviceTypeName(*type, /*lower_case=*/true),
                          at::globalContext().defaultGenerator(guard.getDevice())});
  }
  return generators;
}

std::string RngName(const std::string& kind, int rank) {
  return absl::StrCat("rng.", kind, ".", rank);
}

// Returns a seed for a rank that the checkpoint does not know. The seed depends on rank 0's saved
// state and differs from rank to rank.
uint64_t DerivedSeed(const Manifest& manifest, const std::string& kind, int rank) {
  std::string material =
      absl::StrCat("ddp.elastic.checkpoint.rng ", kind, " ", rank, " ", manifest.id.step, " ");
  for (const TensorRecord& tensor : manifest.tensors) {
    if (tensor.name == RngName(kind, 0)) absl::StrAppend(&material, tensor.hash.Hex());
  }
  uint64_t seed = 0;
  CHECK(absl::SimpleHexAtoi(ContentHash::Of(material).Hex().substr(0, 16), &seed));
  return seed;
}

}  // namespace

std::vector<NamedTensor> RngStates(int rank) {
  std::vector<NamedTensor> states;
  for (const NamedGenerator& named : Generators()) {
    at::Generator generator = named.generator;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    states.push_back({RngName(named.kind, rank), generator.get_state()});
  }
  return states;
}

absl::StatusOr<std::function<void()>> PrepareRng(const LoadedCheckpoint& checkpoint, int rank) {
  std::vector<std::pair<at::Generator, at::Tensor>> states;
  for (const NamedGenerator& named : Generators()) {
    at::Generator copy = [&named] {
      at::Generator generator = named.generator;
      const std::lock_guard<std::mutex> lock(generator.mutex());
      return generator.clone();
    }();
    const auto saved = checkpoint.extra.find(RngName(named.kind, rank));
    if (saved == checkpoint.extra.end()) {
      copy.set_current_seed(DerivedSeed(checkpoint.manifest, named.kind, rank));
      states.emplace_back(named.generator, copy.get_state());
      continue;
    }
    const at::Tensor state = TensorOver(saved->second).clone();
    try {
      copy.set_state(state);
    } catch (const c10::Error& error) {
      return absl::DataLossError(absl::StrCat(
          saved->first, " is no state of a generator: ", error.what_without_backtrace()));
    }
    states.emplace_back(named.generator, state);
  }
  return std::function<void()>([states = std::move(states)]() mutable {
    for (auto& [generator, state] : states) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  });
}

}  // namespace ddp::elastic
