#include "ddp/comm/conformance/test_backends.h"

#include <iterator>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/comm/engine_backend/engine_backend.h"
#include "ddp/comm/hierarchical/tree_partials.h"

namespace ddp::internal {
namespace {

// The combinations of ddp::ReduceOp (see reduce_op.h) and PREMUL_SUM of floating point numbers.
bool FullReduces(Reduction reduction, at::ScalarType type) {
  switch (reduction) {
    case Reduction::AVG:
      return c10::isFloatingType(type) || c10::isComplexType(type);
    case Reduction::PREMUL_SUM:
      return c10::isFloatingType(type);
    case Reduction::BAND:
    case Reduction::BOR:
    case Reduction::BXOR:
      return c10::isIntegralType(type, /*includeBool=*/true);
    default:
      return !c10::isComplexType(type) || reduction == Reduction::SUM;
  }
}

// Our own backends have what a Communicator calls. It gives them bools as bytes and complex numbers
// as pairs, and divides sums for an average.
Claims EngineClaims() {
  return {
      .operations = {Operation::kBroadcast, Operation::kAllReduce, Operation::kAllGatherBase,
                     Operation::kReduceScatterBase, Operation::kAllToAllBase,
                     Operation::kAllToAllBaseUneven, Operation::kSendReceive, Operation::kBarrier},
      .moves = [](Operation, at::ScalarType) { return true; },
      .reduces =
          [](Reduction reduction, at::ScalarType type) {
            return reduction != Reduction::AVG && reduction != Reduction::PREMUL_SUM &&
                   type != at::kBool && !c10::isComplexType(type) && FullReduces(reduction, type);
          },
      .tree_order = true,
      .timeouts = true,
      .abort = Claims::Abort::kAllRanks,
      .mismatch = Claims::Mismatch::kError};
}

// Returns TestedBackend::new_group of a backend whose ranks share nothing but the store.
auto EachRank(BackendPtr (*make)(const Seat& seat)) {
  return [make](const testing::FakeNetwork::Script&) -> RankMaker { return make; };
}

bool GlooMoves(Operation operation, at::ScalarType type) {
  if (operation == Operation::kSendReceive) return true;
  if (c10::isComplexType(type)) return operation == Operation::kBroadcast;
  return type != at::kShort;
}

bool GlooReduces(Reduction reduction, at::ScalarType type) {
  if (type == at::kShort || reduction == Reduction::PREMUL_SUM) return false;
  // Gloo adds bools as bytes: the sum of true and true is 2. LibTorch then divides by way of ATen,
  // which takes a rounded reciprocal for complex numbers.
  if (type == at::kBool && reduction == Reduction::SUM) return false;
  if (c10::isComplexType(type) && reduction == Reduction::AVG) return false;
  return FullReduces(reduction, type);
}

// Gloo of LibTorch 2.11 has no all-to-all of lists of tensors; that of 2.15 has one. Only a call
// tells.
bool GlooHasAllToAll() {
  static const bool has = [] {
    const auto gloo = MakeGlooBackend(c10::make_intrusive<c10d::HashStore>(),
                                      {.timeout = absl::Seconds(60), .single_host = true});
    std::vector<at::Tensor> in = {at::ones({1})};
    std::vector<at::Tensor> out = {at::zeros({1})};
    try {
      gloo->alltoall(out, in)->wait();
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }();
  return has;
}

TestedBackend TestedSharedMemory() {
  const auto make = +[](const Seat& seat) {
    auto backend = MakeEngineBackend(seat.store, {.rank = seat.rank,
                                                  .hosts = {{0, seat.size}},
                                                  .timeout = seat.timeout,
                                                  .connect_timeout = seat.timeout});
    TORCH_CHECK(backend.ok(), std::string(backend.status().message()));
    return *std::move(backend);
  };
  return {.name = "SharedMemory",
          .new_group = EachRank(make),
          .claims = EngineClaims(),
          .add_traits = [](BackendTraits& traits) {
            AddEngineTraits(traits);
            traits.all_see_dead_rank = true;
          }};
}

// Hosts of two ranks; in a group of an odd size the last host has one.
TestedBackend TestedHierarchical() {
  const auto make = +[](const Seat& seat) {
    std::vector<RankRange> hosts;
    for (int rank = 0; rank < seat.size; rank += 2) {
      hosts.push_back({rank, std::min(rank + 2, seat.size)});
    }
    auto backend = MakeEngineBackend(seat.store, {.name = kHierarchicalName,
                                                  .rank = seat.rank,
                                                  .hosts = hosts,
                                                  .timeout = seat.timeout,
                                                  .connect_timeout = seat.timeout,
                                                  .over_loopback = true});
    TORCH_CHECK(backend.ok(), std::string(backend.status().message()));
    return *std::move(backend);
  };
  return {.name = "Hierarchical",
          .new_group = EachRank(make),
          .claims = EngineClaims(),
          .add_traits = &AddEngineTraits};
}

}  // namespace

std::vector<Operation> AllOperations() {
  std::vector<Operation> all;
  for (size_t i = 0; i < std::size(kOperationNames); ++i) all.push_back(Operation(i));
  return all;
}

void PrintTo(const TestedBackend& backend, std::ostream* out) { *out << backend.name; }

std::vector<Operation> AllOperationsBut(const std::vector<Operation>& missing) {
  std::vector<Operation> rest;
  for (const Operation operation : AllOperations()) {
    if (!Claims::Contains(missing, operation)) rest.push_back(operation);
  }
  return rest;
}

TestedBackend TestedGloo() {
  const auto make = +[](const Seat& seat) {
    return MakeGlooBackend(
        seat.store,
        {.rank = seat.rank, .size = seat.size, .timeout = seat.timeout, .single_host = true});
  };
  return {.name = "Gloo",
          .new_group = EachRank(make),
          .claims = {.operations = GlooHasAllToAll() ? AllOperationsBut({})
                                                     : AllOperationsBut({Operation::kAllToAll}),
                     .moves = &GlooMoves,
                     .reduces = &GlooReduces,
                     // Any other operation refuses tensors with gaps, or writes into the gaps.
                     .strided = {Operation::kAllReduceCoalesced, Operation::kAllGather,
                                 Operation::kAllGatherBase, Operation::kAllGatherBaseCoalesced,
                                 Operation::kReduceScatterBase,
                                 Operation::kReduceScatterBaseCoalesced, Operation::kGather},
                     // Their names are too long, as that of a sparse all-reduce is: see
                     // BackendTraits::settled.
                     .alone = {Operation::kAllReduceCoalesced, Operation::kAllGatherBaseCoalesced},
                     .timeouts = true,
                     .abort = Claims::Abort::kOwnRank,
                     // Gloo ends the process when a message is longer than its receiver expects.
                     .mismatch = Claims::Mismatch::kUndefined},
          .add_traits = &AddGlooTraits,
          .serves_one_rank = false};
}

TestedBackend TestedFake(const std::string& name, testing::FakeNetwork::Delivery delivery) {
  using testing::FakeNetwork;
  const auto new_group = [delivery](const FakeNetwork::Script& script) -> RankMaker {
    const auto network =
        std::make_shared<FakeNetwork>(FakeNetwork::Options{.script = script, .delivery = delivery});
    return [network](const Seat& seat) {
      return network->Connect({.store = seat.store,
                               .rank = seat.rank,
                               .size = seat.size,
                               .connect_timeout = absl::ToChronoMilliseconds(seat.timeout)});
    };
  };
  const auto reduces = +[](Reduction reduction, at::ScalarType type) {
    // As with Gloo.
    if (reduction == Reduction::AVG && c10::isComplexType(type)) return false;
    return reduction != Reduction::PREMUL_SUM && FullReduces(reduction, type);
  };
  return {.name = name,
          .new_group = new_group,
          .claims = {.operations = {Operation::kBroadcast, Operation::kAllReduce,
                                    Operation::kAllGatherBase, Operation::kReduceScatterBase,
                                    Operation::kAllToAllBase, Operation::kAllToAllBaseUneven,
                                    Operation::kSendReceive},
                     .moves = [](Operation, at::ScalarType) { return true; },
                     .reduces = reduces,
                     .mismatch = Claims::Mismatch::kNoResult}};
}

std::vector<TestedBackend> TestedBackends() {
  using Delivery = testing::FakeNetwork::Delivery;
  return {
      TestedGloo(),
      TestedSharedMemory(),
      TestedHierarchical(),
      TestedFake("Fake", Delivery::kLastArriver),
      TestedFake("FakeWithThread", Delivery::kOwnThread),
  };
}

}  // namespace ddp::internal
