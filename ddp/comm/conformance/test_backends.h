// The backends that the conformance tests run on, and what each of them claims to do.
//
// How to add a backend: add one entry to TestedBackends() at the end of this file, and its target
// to the deps of `:test_backends`.
//   - new_group    a function that makes the backend of one rank; EachRank() wraps such a function
//   - claims       the collectives, types, and behaviours; FullClaims() is a whole c10d Backend
//   - add_traits   the BackendTraits of ddp/, where the backend has any
// Every suite of this folder then runs on the new backend. A test whose subject is not claimed is
// skipped, with the reason. A test fails when a backend claims no sum of most types, and when an
// operation works that it does not claim.
#ifndef DDP_COMM_CONFORMANCE_TEST_BACKENDS_H_
#define DDP_COMM_CONFORMANCE_TEST_BACKENDS_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/time/time.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/comm/hierarchical/hierarchical_backend.h"
#include "ddp/comm/hierarchical/tree_partials.h"
#include "ddp/comm/shared_memory/shared_memory_backend.h"
#include "testing/backend/fake_backend.h"

namespace ddp::internal {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Reduction = c10d::ReduceOp::RedOpType;

// The calls of c10d::Backend that the tests know.
enum class Operation : uint8_t {
  kBroadcast,
  kAllReduce,
  kAllReduceCoalesced,
  kReduce,
  kAllGather,
  kAllGatherBase,
  kAllGatherBaseCoalesced,
  kReduceScatter,
  kReduceScatterBase,
  kReduceScatterBaseCoalesced,
  kAllToAll,
  kAllToAllBase,
  kAllToAllBaseUneven,
  kGather,
  kScatter,
  kSendReceive,
  kReceiveAny,
  kBarrier,
};

inline constexpr const char* kOperationNames[] = {"broadcast",
                                                  "allreduce",
                                                  "allreduce_coalesced",
                                                  "reduce",
                                                  "allgather",
                                                  "_allgather_base",
                                                  "allgather_into_tensor_coalesced",
                                                  "reduce_scatter",
                                                  "_reduce_scatter_base",
                                                  "reduce_scatter_tensor_coalesced",
                                                  "alltoall",
                                                  "alltoall_base",
                                                  "alltoall_base with uneven splits",
                                                  "gather",
                                                  "scatter",
                                                  "send and recv",
                                                  "recvAnysource",
                                                  "barrier"};

inline const char* NameOf(Operation operation) {
  return kOperationNames[static_cast<size_t>(operation)];
}

inline std::vector<Operation> AllOperations() {
  std::vector<Operation> all;
  for (size_t i = 0; i < std::size(kOperationNames); ++i) all.push_back(Operation(i));
  return all;
}

inline constexpr Reduction kAllReductions[] = {
    Reduction::SUM,  Reduction::AVG, Reduction::PRODUCT, Reduction::MIN,       Reduction::MAX,
    Reduction::BAND, Reduction::BOR, Reduction::BXOR,    Reduction::PREMUL_SUM};

inline constexpr at::ScalarType kAllTypes[] = {
    at::kByte,     at::kChar,  at::kShort,  at::kInt,  at::kLong,         at::kHalf,
    at::kBFloat16, at::kFloat, at::kDouble, at::kBool, at::kComplexFloat, at::kComplexDouble};

// The claims of a backend. The tests hold it to each of them.
struct Claims {
  enum class Mismatch : uint8_t {
    kError,      // collectives that differ end with an error on each rank that needs its peers
    kNoResult,   // they never end
    kUndefined,  // anything, the end of the process too: no test provokes it
  };
  enum class Abort : uint8_t {
    kNone,
    kOwnRank,   // ends this rank's operations; a peer of a peer may wait until its timeout
    kAllRanks,  // ends the operations of all ranks
  };

  std::vector<Operation> operations;
  // The types of operations that do not reduce, and of those that do.
  bool (*moves)(Operation operation, at::ScalarType type) = nullptr;
  bool (*reduces)(Reduction reduction, at::ScalarType type) = nullptr;

  std::vector<Operation> strided;  // the operations that take tensors with gaps
  std::vector<Operation> alone;    // the operations that must be the only one in progress
  bool tree_order = false;         // sums are taken in the balanced binary tree
  bool timeouts = false;           // setTimeout(), and an error when a rank never comes
  Abort abort = Abort::kNone;      // by BackendTraits::end_operations, otherwise by abort()
  Mismatch mismatch = Mismatch::kUndefined;

  bool Has(Operation operation) const { return Contains(operations, operation); }
  bool Alone(Operation operation) const { return Contains(alone, operation); }
  bool TakesStrided(Operation operation) const { return Contains(strided, operation); }

  static bool Contains(const std::vector<Operation>& in, Operation operation) {
    return std::find(in.begin(), in.end(), operation) != in.end();
  }
};

// One rank's place in a new group.
struct Seat {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  absl::Duration timeout = absl::Seconds(60);  // of connecting, and of one operation
};

// Makes the backend of one rank. The ranks of a group call it at the same time. It must outlive the
// backends.
using RankMaker = std::function<BackendPtr(const Seat& seat)>;

struct TestedBackend {
  std::string name;
  // Called once for each group. Only a fake network has use for the script, which may be null.
  std::function<RankMaker(const testing::FakeNetwork::Script& script)> new_group;
  Claims claims;
  void (*add_traits)(BackendTraits& traits) = nullptr;
  // False when ddp/ makes no such backend for a group of one rank.
  bool serves_one_rank = true;
};

inline void PrintTo(const TestedBackend& backend, std::ostream* out) { *out << backend.name; }

inline std::vector<Operation> AllOperationsBut(const std::vector<Operation>& missing) {
  std::vector<Operation> rest;
  for (const Operation operation : AllOperations()) {
    if (!Claims::Contains(missing, operation)) rest.push_back(operation);
  }
  return rest;
}

// The combinations of ddp::ReduceOp (see reduce_op.h) and PREMUL_SUM of floating point numbers.
inline bool FullReduces(Reduction reduction, at::ScalarType type) {
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

// The claims of a whole c10d Backend.
inline Claims FullClaims() {
  return {.operations = AllOperations(),
          .moves = [](Operation, at::ScalarType) { return true; },
          .reduces = &FullReduces,
          .strided = AllOperations(),
          .tree_order = true,
          .timeouts = true,
          .abort = Claims::Abort::kAllRanks,
          .mismatch = Claims::Mismatch::kError};
}

// Returns TestedBackend::new_group of a backend whose ranks share nothing but the store.
inline auto EachRank(BackendPtr (*make)(const Seat& seat)) {
  return [make](const testing::FakeNetwork::Script&) -> RankMaker { return make; };
}

inline bool GlooMoves(Operation operation, at::ScalarType type) {
  if (operation == Operation::kSendReceive) return true;
  if (c10::isComplexType(type)) return operation == Operation::kBroadcast;
  return type != at::kShort;
}

inline bool GlooReduces(Reduction reduction, at::ScalarType type) {
  if (type == at::kShort || reduction == Reduction::PREMUL_SUM) return false;
  // Gloo adds bools as bytes: the sum of true and true is 2. LibTorch then divides by way of ATen,
  // which takes a rounded reciprocal for complex numbers.
  if (type == at::kBool && reduction == Reduction::SUM) return false;
  if (c10::isComplexType(type) && reduction == Reduction::AVG) return false;
  return FullReduces(reduction, type);
}

// Gloo of LibTorch 2.11 has no all-to-all of lists of tensors; that of 2.15 has one. Only a call
// tells.
inline bool GlooHasAllToAll() {
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

inline TestedBackend TestedGloo() {
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

inline TestedBackend TestedFake(const std::string& name, testing::FakeNetwork::Delivery delivery) {
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

inline TestedBackend TestedSharedMemory() {
  const auto make = +[](const Seat& seat) {
    auto backend = MakeSharedMemoryBackend(seat.store, {.rank = seat.rank,
                                                        .size = seat.size,
                                                        .timeout = seat.timeout,
                                                        .connect_timeout = seat.timeout});
    TORCH_CHECK(backend.ok(), std::string(backend.status().message()));
    return *std::move(backend);
  };
  return {.name = "SharedMemory",
          .new_group = EachRank(make),
          .claims = FullClaims(),
          .add_traits = &AddSharedMemoryTraits};
}

// Hosts of two ranks; in a group of an odd size the last host has one.
inline TestedBackend TestedHierarchical() {
  const auto make = +[](const Seat& seat) {
    std::vector<RankRange> hosts;
    for (int rank = 0; rank < seat.size; rank += 2) {
      hosts.push_back({rank, std::min(rank + 2, seat.size)});
    }
    auto backend = MakeHierarchicalBackend(seat.store, {.rank = seat.rank,
                                                        .hosts = hosts,
                                                        .timeout = seat.timeout,
                                                        .connect_timeout = seat.timeout,
                                                        .over_loopback = true});
    TORCH_CHECK(backend.ok(), std::string(backend.status().message()));
    return *std::move(backend);
  };
  Claims claims = FullClaims();
  // Messages go through Gloo.
  claims.strided = AllOperationsBut({Operation::kSendReceive, Operation::kReceiveAny});
  return {.name = "Hierarchical",
          .new_group = EachRank(make),
          .claims = claims,
          .add_traits = &AddHierarchicalTraits};
}

// ---- The backends of all suites.

inline std::vector<TestedBackend> TestedBackends() {
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

#endif  // DDP_COMM_CONFORMANCE_TEST_BACKENDS_H_
