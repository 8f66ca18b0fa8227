// The backends that the conformance tests run on, and what each of them claims to do.
//
// How to add a backend: add one entry to TestedBackends() in test_backends.cc, and its target to
// the deps of `:test_backends`.
//   - new_group    a function that makes the backend of one rank; EachRank() wraps such a function
//   - claims       the collectives, types, and behaviours
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
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/time/time.h"
#include "ddp/comm/backend/backend_traits.h"
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

std::vector<Operation> AllOperations();

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

void PrintTo(const TestedBackend& backend, std::ostream* out);

std::vector<Operation> AllOperationsBut(const std::vector<Operation>& missing);

TestedBackend TestedGloo();

TestedBackend TestedFake(const std::string& name, testing::FakeNetwork::Delivery delivery);

// The backends of all suites.
std::vector<TestedBackend> TestedBackends();

}  // namespace ddp::internal

#endif  // DDP_COMM_CONFORMANCE_TEST_BACKENDS_H_
