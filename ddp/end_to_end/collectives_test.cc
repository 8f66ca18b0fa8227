// Tests the collectives of a process group on real processes with Gloo. Compares every form of each
// collective with a computation of one process. Also tests messages between two ranks, ranks that
// disagree, and groups over a program's own c10d backend.
//
// Length: every form of every collective stands beside its computation in one process.
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/common/reduce_op.h"
#include "ddp/process_group.h"
#include "ddp/register_backend.h"
#include "ddp/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using internal::MakeGlooBackend;

using ::ddp::testing::ErrorOf;
using ::ddp::testing::ErrorOfPeer;
using ::ddp::testing::RankStore;
using ::ddp::testing::RankTestOptions;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Le;

constexpr at::ScalarType kAllTypes[] = {
    at::kByte, at::kChar,        at::kShort,  at::kInt,          at::kLong,
    at::kHalf, at::kBFloat16,    at::kFloat,  at::kDouble,       at::kComplexFloat,
    at::kBool, at::kFloat8_e5m2, at::kUInt16, at::kComplexDouble};

// The ranks meet in a TCPStore: these tests need no Redis.
RankTestOptions ThreeRanks(const std::string& not_on_device = "") {
  return {.world_size = 3, .stores = {RankStore::kTcpStore}, .not_on_device = not_on_device};
}

// Returns the input of `rank`: small whole numbers, so that every type holds them and their sums
// exactly.
at::Tensor InputOf(int rank, std::vector<int64_t> shape, at::ScalarType type = at::kFloat) {
  const int64_t count = c10::multiply_integers(shape);
  const at::Tensor numbers = (torch::arange(count, at::kLong) * 7 + rank * 3).remainder(5);
  return (type == at::kBool ? numbers.gt(2) : numbers).view(shape).to(type);
}

std::vector<at::Tensor> InputsOf(int size, const std::vector<int64_t>& shape,
                                 at::ScalarType type = at::kFloat) {
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(InputOf(rank, shape, type));
  return inputs;
}

// Returns a tensor with the same elements, and with strides that are not contiguous.
at::Tensor Strided(const at::Tensor& tensor) {
  const at::Tensor wide = torch::zeros({tensor.numel(), 2}, tensor.options());
  const at::Tensor strided = wide.select(1, 0).view(tensor.sizes());
  strided.copy_(tensor);
  EXPECT_FALSE(tensor.numel() > 1 && strided.is_contiguous());
  return strided;
}

void ExpectEqual(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  // Compares bytes, because not every type has operators.
  const at::Tensor a = actual.resolve_conj().contiguous().view({-1}).view(at::kByte);
  const at::Tensor b = expected.resolve_conj().contiguous().view({-1}).view(at::kByte);
  EXPECT_TRUE(at::equal(a, b)) << what << ":\n" << actual << "\nexpected\n" << expected;
}

// ---- Reductions

// Returns the result computed by one process, element by element, from the definition of each
// operation.
at::Tensor Reduced(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  at::Tensor result = inputs[0].clone();
  for (size_t i = 1; i < inputs.size(); ++i) {
    const at::Tensor& next = inputs[i];
    const bool bools = next.scalar_type() == at::kBool;
    if (op == ReduceOp::kSum || op == ReduceOp::kAverage) {
      result = bools ? result.logical_or(next) : result + next;
    }
    if (op == ReduceOp::kProduct) result = bools ? result.logical_and(next) : result * next;
    if (op == ReduceOp::kMin) result = bools ? result.logical_and(next) : at::minimum(result, next);
    if (op == ReduceOp::kMax) result = bools ? result.logical_or(next) : at::maximum(result, next);
    if (op == ReduceOp::kBitAnd) result = result.bitwise_and(next);
    if (op == ReduceOp::kBitOr) result = result.bitwise_or(next);
    if (op == ReduceOp::kBitXor) result = result.bitwise_xor(next);
  }
  if (op == ReduceOp::kAverage) result.div_(static_cast<int64_t>(inputs.size()));
  return result;
}

constexpr ReduceOp kAllOps[] = {ReduceOp::kSum,   ReduceOp::kAverage, ReduceOp::kProduct,
                                ReduceOp::kMin,   ReduceOp::kMax,     ReduceOp::kBitAnd,
                                ReduceOp::kBitOr, ReduceOp::kBitXor};

bool Has(at::ScalarType type, ReduceOp op) {
  const bool integral = c10::isIntegralType(type, true);
  if (op == ReduceOp::kAverage) return !integral;
  if (op >= ReduceOp::kBitAnd) return integral;
  return !c10::isComplexType(type) || op == ReduceOp::kSum;
}

RANK_TEST(CollectivesTest, Reductions, ThreeRanks()) {
  const auto group = init_process_group();
  const int size = group->size();
  const std::vector<int64_t> shape = {3, 4};
  for (const at::ScalarType type :
       {at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat,
        at::kDouble, at::kComplexFloat, at::kBool}) {
    for (const ReduceOp op : kAllOps) {
      // As with NCCL, devices have no operations on bits.
      if (op >= ReduceOp::kBitAnd && !group->device().is_cpu()) continue;
      const std::string what =
          absl::StrCat(c10::toString(type), ", operation ", static_cast<int>(op));
      const at::Tensor mine = InputOf(group->rank(), shape, type);
      if (!Has(type, op)) {
        EXPECT_THAT(ErrorOf<ConfigurationError>([&] { group->all_reduce(mine, op); }),
                    HasSubstr(absl::StrCat("rank ", group->rank(), ": all_reduce: ")))
            << what;
        continue;
      }
      const at::Tensor expected = Reduced(InputsOf(size, shape, type), op);
      const at::Tensor strided = Strided(mine);
      group->all_reduce(mine, op);
      ExpectEqual(mine, expected, what);
      group->all_reduce(strided, op);
      ExpectEqual(strided, expected, absl::StrCat(what, ", strided"));

      // reduce_scatter: every rank keeps one part.
      std::vector<at::Tensor> inputs = InputsOf(size, {size, 4}, type);
      const at::Tensor part = torch::empty({4}, expected.options());
      group->reduce_scatter(part, inputs[group->rank()], op);
      ExpectEqual(part, Reduced(inputs, op)[group->rank()], absl::StrCat(what, ", scattered"));
      const at::Tensor strided_part = Strided(torch::zeros({2, 2}, expected.options()));
      group->reduce_scatter(strided_part, inputs[group->rank()].unbind(), op);
      ExpectEqual(strided_part.reshape({4}), part, absl::StrCat(what, ", from a list"));
    }
  }
  {
    const c10::InferenceMode inference;
    const at::Tensor strided = Strided(torch::full({4}, static_cast<float>(group->rank())));
    group->all_reduce(strided, ReduceOp::kAverage);
    EXPECT_EQ(strided[3].item<float>(), static_cast<float>(size - 1) / 2);
    const at::Tensor part = torch::zeros({2});
    group->reduce_scatter(part, torch::ones({2 * size}), ReduceOp::kAverage);
    EXPECT_EQ(part[1].item<float>(), 1);
  }
  const at::Tensor leaf = torch::ones({4}).requires_grad_();
  group->all_reduce(leaf, ReduceOp::kAverage);
  EXPECT_TRUE(leaf.requires_grad() && leaf.is_leaf());
  if (!leaf.is_cpu()) return;  // sparse tensors are the CPU's
  const at::Tensor sparse_leaf =
      at::sparse_coo_tensor(torch::zeros({1, 1}, at::kLong), torch::ones({1}), {8})
          .requires_grad_();
  group->all_reduce(sparse_leaf);
  EXPECT_EQ(sparse_leaf.detach().to_dense().sum().item<float>(), static_cast<float>(size));
  const at::Tensor sparse = at::sparse_coo_tensor(at::tensor({int64_t{group->rank()}}).view({1, 1}),
                                                  torch::full({1}, 6.0F), {8});
  group->all_reduce(sparse, ReduceOp::kAverage);
  EXPECT_EQ(sparse.to_dense().sum().item<float>(), 6.0F);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { group->all_reduce(sparse, ReduceOp::kMax); }),
              HasSubstr("summed or averaged only"));
}

// ---- Moving data

RANK_TEST(CollectivesTest, MovesEveryType, ThreeRanks()) {
  const auto group = init_process_group();
  const int rank = group->rank();
  const int size = group->size();
  for (const at::ScalarType type : kAllTypes) {
    const std::string what = c10::toString(type);
    const std::vector<at::Tensor> inputs = InputsOf(size, {size, 2}, type);
    const at::Tensor mine = inputs[rank];

    for (const bool strided : {false, true}) {
      const auto like = [&](const at::Tensor& tensor) {
        return strided ? Strided(tensor) : tensor.clone();
      };
      const at::Tensor received = like(mine);
      group->broadcast(received, size - 1);
      ExpectEqual(received, inputs[size - 1], what + ", broadcast");

      const at::Tensor gathered = like(at::cat(InputsOf(size, {size, 2}, type)).zero_());
      group->all_gather(gathered, like(mine));
      ExpectEqual(gathered, at::cat(inputs), what + ", gathered");
      std::vector<at::Tensor> list;
      for (int i = 0; i < size; ++i) list.push_back(like(at::zeros_like(mine)));
      group->all_gather(list, like(mine));
      for (int i = 0; i < size; ++i) ExpectEqual(list[i], inputs[i], what + ", gathered in a list");

      const at::Tensor exchanged = like(at::zeros_like(mine));
      group->all_to_all(exchanged, like(mine));
      for (int i = 0; i < size; ++i) {
        ExpectEqual(exchanged[i], inputs[i][rank], what + ", exchanged");
      }

      // Messages around a ring. With NCCL, and so on a device, each would wait for the next one.
      if (!mine.is_cpu()) continue;
      const at::Tensor previous = like(at::zeros_like(mine));
      const Work sent = group->send_async(like(mine), (rank + 1) % size);
      group->recv(previous, (rank + size - 1) % size);
      Work(sent).wait();
      ExpectEqual(previous, inputs[(rank + size - 1) % size], what + ", around a ring");
    }
  }
}

// Rank a sends (a + b) % 3 rows to rank b: none to two.
RANK_TEST(CollectivesTest, ExchangesDifferentSizes, ThreeRanks()) {
  const auto group = init_process_group();
  const int rank = group->rank();
  const int size = group->size();
  std::vector<int64_t> to;
  std::vector<int64_t> from;
  int64_t rows_to = 0;
  int64_t rows_from = 0;
  for (int other = 0; other < size; ++other) {
    to.push_back((rank + other) % 3);
    from.push_back((other + rank) % 3);
    rows_to += to.back();
    rows_from += from.back();
  }
  const at::Tensor input = torch::full({rows_to, 2}, rank, at::kDouble);
  const at::Tensor output = torch::full({rows_from, 2}, -1, at::kDouble);
  group->all_to_all(output, input, from, to);
  int64_t row = 0;
  for (int other = 0; other < size; ++other) {
    for (int64_t i = 0; i < from[other]; ++i) EXPECT_EQ(output[row++][1].item<double>(), other);
  }
  EXPECT_EQ(row, rows_from);

  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  for (int other = 0; other < size; ++other) {
    inputs.push_back(torch::full({to[other], 3}, 10 * rank + other, at::kInt));
    outputs.push_back(torch::zeros({3, from[other]}, at::kInt).t());  // not contiguous
  }
  Work work = group->all_to_all_async(outputs, inputs);
  work.wait();
  for (int other = 0; other < size; ++other) {
    EXPECT_TRUE(outputs[other].eq(10 * other + rank).all().item<bool>()) << outputs[other];
  }

  // First no rank sends anything; then only one rank does.
  group->all_to_all(torch::empty({0, 2}), torch::empty({0, 2}), std::vector<int64_t>(size, 0),
                    std::vector<int64_t>(size, 0));
  std::vector<int64_t> to_zero(size, 0);
  std::vector<int64_t> from_last(size, 0);
  if (rank == size - 1) to_zero[0] = 4;
  if (rank == 0) from_last[size - 1] = 4;
  const at::Tensor four = torch::zeros({rank == 0 ? 4 : 0});
  group->all_to_all(four, torch::ones({rank == size - 1 ? 4 : 0}), from_last, to_zero);
  EXPECT_EQ(four.sum().item<float>(), rank == 0 ? 4 : 0);
}

// ---- Operations in progress

RANK_TEST(CollectivesTest, ManyAtOnce, ThreeRanks()) {
  const auto group = init_process_group();
  const int rank = group->rank();
  const int size = group->size();
  const at::Tensor sum = torch::full({100000}, 1.0F);
  const at::Tensor average = torch::full({7}, static_cast<float>(rank));
  const at::Tensor gathered = torch::zeros({size});
  const at::Tensor part = torch::zeros({1});
  const at::Tensor exchanged = torch::zeros({size});
  const at::Tensor dropped = Strided(torch::ones({5}));
  std::vector<Work> works;
  works.push_back(group->all_reduce_async(sum));
  works.push_back(group->all_reduce_async(average, ReduceOp::kAverage));
  works.push_back(group->all_gather_async(gathered, torch::full({1}, static_cast<float>(rank))));
  works.push_back(group->reduce_scatter_async(part, torch::ones({size})));
  const TensorFuture dropped_future = group->all_reduce_async(dropped);  // no thread waits for it
  works.push_back(
      group->all_to_all_async(exchanged, torch::full({size}, static_cast<float>(rank))));
  works.push_back(group->broadcast_async(torch::ones({3}), 1));
  works.push_back(group->barrier_async());
  for (auto work = works.rbegin(); work != works.rend(); ++work) {
    (*work)->wait();
    EXPECT_TRUE(work->completed() || !sum.is_cpu());  // on a device it may still run
    work->wait();                                     // ends as the first call did
  }
  EXPECT_EQ(sum[99999].item<float>(), static_cast<float>(size));
  EXPECT_EQ(average[6].item<float>(), static_cast<float>(size - 1) / 2);
  EXPECT_TRUE(at::equal(gathered, torch::arange(size, at::kFloat)));
  EXPECT_TRUE(at::equal(exchanged, torch::arange(size, at::kFloat)));
  EXPECT_EQ(part.item<float>(), static_cast<float>(size));
  while (!dropped_future->completed()) {
  }
  if (!dropped.is_cpu()) dropped_future->wait();  // orders the stream
  EXPECT_EQ(dropped[4].item<float>(), static_cast<float>(size));

  Work empty;
  empty.wait();
  EXPECT_TRUE(empty.completed());
  EXPECT_TRUE(empty.future()->value().toTensorVector().empty());

  // The value of the future is the program's own tensor, also for a chained future.
  const at::Tensor strided = Strided(torch::ones({5}));
  Work work = group->all_reduce_async(strided, ReduceOp::kAverage);
  const TensorFuture doubled = work->then([](c10::ivalue::Future& done) {
    return c10::IValue(done.value().toTensorVector().at(0) * 2);
  });
  doubled->wait();
  EXPECT_EQ(doubled->value().toTensor().sum().item<float>(), 10);
  EXPECT_TRUE(work.future()->value().toTensorVector().at(0).is_same(strided));
}

RANK_TEST(CollectivesTest, Messages,
          ThreeRanks(/*not_on_device=*/"a device's messages have no tags, as NCCL's")) {
  const auto group = init_process_group();
  const int rank = group->rank();
  if (rank < 2) {
    const int peer = 1 - rank;
    // Both ranks send first. Messages with one tag keep their order, whatever the order of waiting.
    std::vector<Work> sent;
    for (int i = 0; i < 10; ++i) {
      sent.push_back(
          group->send_async(torch::full({i + 1}, 100 * rank + i, at::kInt), peer, i % 2));
    }
    std::vector<at::Tensor> tensors;
    std::vector<Work> received;
    for (int i = 0; i < 10; ++i) tensors.push_back(torch::zeros({i + 1}, at::kInt));
    for (int i = 1; i < 10; i += 2) received.push_back(group->recv_async(tensors[i], peer, 1));
    for (int i = 0; i < 10; i += 2) received.push_back(group->recv_async(tensors[i], peer, 0));
    for (auto work = received.rbegin(); work != received.rend(); ++work) work->wait();
    for (Work& work : sent) work.wait();
    for (int i = 0; i < 10; ++i) {
      EXPECT_TRUE(tensors[i].eq(100 * peer + i).all().item<bool>()) << tensors[i];
    }
    // A large message, and one without elements.
    const at::Tensor large = torch::full({1 << 20}, rank, at::kDouble);
    if (rank == 0) {
      group->send(large, 1, 7);
      group->send(torch::zeros({0}), 1, 7);
    } else {
      group->recv(large, 0, 7);
      EXPECT_EQ(large.sum().item<double>(), 0);
      group->recv(torch::zeros({0}), 0, 7);
    }
  }
  // All ranks run a collective while a message of two ranks is pending.
  const at::Tensor late = torch::zeros({3});
  Work waiting;
  if (rank == 0) waiting = group->recv_async(late, 1, 3);
  for (int i = 0; i < 100; ++i) group->all_reduce(torch::ones({4}));
  if (rank == 0) {
    // The communicator still drops the complete collectives after the pending message.
    EXPECT_THAT(group->communicator().log()->Position().newest.size(), Le(10));
  }
  if (rank == 1) group->send(torch::ones({3}), 0, 3);
  waiting.wait();
  EXPECT_EQ(late.sum().item<float>(), rank == 0 ? 3 : 0);
  group->barrier();
}

// ---- Errors

// collective_arguments_test.cc has the bad arguments. Nothing has started, so the group is intact.
RANK_TEST(CollectivesTest, BadArgumentsLeaveTheGroupIntact, ThreeRanks()) {
  const auto group = init_process_group();
  const at::Tensor good = torch::ones({4});
  const auto text = [&](const char* what) {
    return HasSubstr(absl::StrCat("rank ", group->rank(), ": ", what));
  };
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { group->all_reduce(at::Tensor()); }),
              text("all_reduce: a tensor is undefined"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { group->reduce_scatter(good, good); }),
              text("reduce_scatter: the input has 4 elements"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { group->all_to_all(good, good, {4}, {4}); }),
              text("all_to_all: the sizes [4] do not split"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { group->send(good, group->rank()); }),
              text("send to rank "));
  group->all_reduce(good);
  EXPECT_EQ(good[0].item<float>(), static_cast<float>(group->size()));
}

// Checks that every rank throws, and that the group works in its next incarnation.
void ExpectFailureForAll(ProcessGroup& group, const std::function<void()>& call,
                         const std::string& text) {
  EXPECT_THAT(ErrorOf<CommunicationError>(call), HasSubstr(text));
  group.ensure_usable();
  const at::Tensor ones = torch::ones({2});
  group.all_reduce(ones);
  EXPECT_EQ(ones[0].item<float>(), static_cast<float>(group.size()));
}

RANK_TEST(
    CollectivesTest, Disagreement,
    ThreeRanks(
        /*not_on_device=*/"ranks in different collectives are named with shm and Gloo only")) {
  const auto group = init_process_group();
  const int rank = group->rank();
  const int size = group->size();
  // Rank 0's operation differs from the others': another collective, another size, another
  // operation.
  ExpectFailureForAll(
      *group,
      [&] {
        if (rank == 0) group->all_gather(torch::ones({size}), torch::ones({1}));
        if (rank != 0) group->reduce_scatter(torch::ones({1}), torch::ones({size}));
      },
      "the ranks are in different collectives");
  ExpectFailureForAll(
      *group, [&] { group->all_gather(torch::ones({size * (rank + 1)}), torch::ones({rank + 1})); },
      "tensors of different size");
  ExpectFailureForAll(
      *group,
      [&] { group->all_reduce(torch::ones({4}), rank == 1 ? ReduceOp::kMax : ReduceOp::kAverage); },
      "all-reduce (maximum)");
  // Rank 1 expects two elements more than rank 0 sends.
  std::vector<int64_t> to(size, 1);
  std::vector<int64_t> from(size, 1);
  if (rank == 1) from[0] = 3;
  ExpectFailureForAll(
      *group,
      [&] {
        group->all_to_all(torch::ones({rank == 1 ? size + 2 : size}), torch::ones({size}), from,
                          to);
        group->barrier();
      },
      "rank 0 sends 1 elements to this rank, which receives 3");
  // A message of another size, and one of another type.
  ExpectFailureForAll(
      *group,
      [&] {
        if (rank == 0) group->send(torch::ones({100000}), 1);
        if (rank == 1) group->recv(torch::ones({50000}), 0);
        group->barrier();
      },
      "rank 0 sends 100000 elements of Float, and this rank receives 50000 elements of Float");
  ExpectFailureForAll(
      *group,
      [&] {
        if (rank == 0) group->send(torch::ones({1}, at::kLong), 1);
        if (rank == 1) group->recv(torch::ones({2}, at::kInt), 0);
        group->barrier();
      },
      "1 element of Long, and this rank receives 2 elements of Int");
  // The same when a rank waits not for the message but in other operations: the first that follows
  // the message's arrival throws.
  ExpectFailureForAll(
      *group,
      [&] {
        if (rank == 0) group->send(torch::ones({1}), 1);
        if (rank == 1) group->recv_async(torch::ones({2}), 0);
        while (true) group->barrier();
      },
      "1 element of Float, and this rank receives 2 elements of Float");
}

// A rank with a pending message waits in a collective, and another rank ends.
RANK_TEST(CollectivesTest, LeavesWhileAMessageIsPending,
          ThreeRanks(/*not_on_device=*/"a first message waits for its peer, as NCCL's")) {
  const auto group = init_process_group();
  const int rank = group->rank();
  Work pending;
  if (rank == 0) pending = group->recv_async(torch::zeros({4}), 1, 5);
  group->barrier();
  if (rank == 2) return;
  EXPECT_THAT(ErrorOf<PeerFailedError>([&] { group->all_reduce(torch::ones({4})); }),
              AllOf(HasSubstr("because rank 2 failed"), HasSubstr("ddp::Join")));
}

// A rank waits for a message of a rank that ends without sending it.
RANK_TEST(CollectivesTest, LeavesWithoutSending,
          ThreeRanks(/*not_on_device=*/"a first message waits for its peer, as NCCL's")) {
  auto group = init_process_group();
  const at::Tensor tensor = torch::zeros({4});
  if (group->rank() == 0) {
    Work work = group->recv_async(tensor, 1, 5);
    group->barrier();
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] { work.wait(); }),
                AllOf(HasSubstr("because rank 1 failed"), HasSubstr("a message from rank 1")));
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] { work.wait(); }), HasSubstr("rank 1"));
    return;
  }
  group->barrier();
  if (group->rank() == 1) return;
  // The other ranks stay until rank 0 has finished.
  EXPECT_THAT(ErrorOf<CommunicationError>([&] { group->barrier(); }), HasSubstr("rank 1"));
}

// A Work outlives its incarnation, and another one its group.
RANK_TEST(CollectivesTest, OutlivesItsGroup,
          ThreeRanks(/*not_on_device=*/"a device's operation is not known to be complete")) {
  auto group = init_process_group();
  const at::Tensor done = torch::ones({4});
  Work complete = group->all_reduce_async(done);
  group->barrier();
  while (!complete.completed()) {
  }
  Work lost;
  if (group->rank() == 0) {
    lost = group->all_reduce_async(torch::ones({4}));
    group->store()->set("started", "1");
  }
  if (group->rank() == 1) {
    group->store()->wait({"started"}, std::chrono::seconds(60));
    group->report_failure("on purpose");
  }
  if (group->rank() != 1) {
    EXPECT_THAT(ErrorOfPeer<PeerFailedError>(*group, [&] { group->barrier(); }),
                HasSubstr("on purpose"));
  }
  group->ensure_usable();
  if (group->rank() == 0) {
    EXPECT_THAT(ErrorOf<CommunicationError>([&] { lost.wait(); }),
                HasSubstr("was started before the process group was renewed"));
  }
  complete.wait();  // it was complete before the failure
  EXPECT_EQ(done[0].item<float>(), static_cast<float>(group->size()));
  group->barrier();
  Work late = group->all_reduce_async(torch::ones({4}));
  group->barrier();
  group.reset();
  if (!late.completed()) {
    EXPECT_THAT(ErrorOf<CommunicationError>([&] { late.wait(); }), HasSubstr("destroyed"));
  }
}

// ---- A program's own backend

// A program's backend: its operations are Gloo's, and its works have no futures.
class FuturelessBackend : public c10d::Backend {
 public:
  explicit FuturelessBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "futureless"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return Hide(inner_->allreduce(tensors, options));
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return Hide(inner_->broadcast(tensors, options));
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer,
                                      int tag) override {
    return Hide(inner_->send(tensors, peer, tag));
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer,
                                      int tag) override {
    return Hide(inner_->recv(tensors, peer, tag));
  }

 private:
  struct Hidden : c10d::Work {
    explicit Hidden(c10::intrusive_ptr<c10d::Work> inner) : inner(std::move(inner)) {}
    bool wait(std::chrono::milliseconds timeout) override { return inner->wait(timeout); }
    const c10::intrusive_ptr<c10d::Work> inner;
  };
  static c10::intrusive_ptr<c10d::Work> Hide(c10::intrusive_ptr<c10d::Work> work) {
    return c10::make_intrusive<Hidden>(std::move(work));
  }

  const c10::intrusive_ptr<c10d::Backend> inner_;
};

c10::intrusive_ptr<c10d::Backend> Gloo(const BackendRequest& request) {
  return MakeGlooBackend(request.store, {.rank = request.rank,
                                         .size = request.size,
                                         .timeout = absl::Seconds(60),
                                         .single_host = true});
}

c10::intrusive_ptr<c10d::Backend> Futureless(const BackendRequest& request) {
  return c10::make_intrusive<FuturelessBackend>(Gloo(request));
}

RANK_TEST(CollectivesTest, OwnBackend,
          ThreeRanks(/*not_on_device=*/"it names backends of the CPU")) {
  std::vector<int64_t> made;
  const auto group = init_process_group({.make_backend = [&made](const BackendRequest& request) {
    made.push_back(request.incarnation);
    return Futureless(request);
  }});
  const int rank = group->rank();
  EXPECT_EQ(group->backend(), "futureless");
  for (int round = 0; round < 2; ++round) {
    const at::Tensor sum = torch::full({3}, rank + 1.0F);
    group->all_reduce(sum);
    EXPECT_EQ(sum[2].item<float>(), static_cast<float>(group->size() * (group->size() + 1)) / 2);
    const at::Tensor root = torch::full({3}, rank, at::kShort);
    group->broadcast(root, 1);
    EXPECT_EQ(root[0].item<int64_t>(), 1);
    if (rank == 0) group->send(torch::ones({2}), 1, 4);
    const at::Tensor received = torch::zeros({2});
    if (rank == 1) {
      group->recv(received, 0, 4);
      EXPECT_EQ(received.sum().item<float>(), 2);
    }
    group->barrier();
    if (round == 1) break;
    // The backend has no all-gather: the call fails with the backend's name. The group then works
    // in a new incarnation.
    EXPECT_THAT(ErrorOf<CommunicationError>(
                    [&] { group->all_gather(torch::ones({group->size()}), torch::ones({1})); }),
                HasSubstr("Backend futureless does not support "));
    group->ensure_usable();
  }
  EXPECT_THAT(made, ElementsAre(0, 1));
  const auto pair = group->new_group({0, 1});
  EXPECT_EQ(pair == nullptr, rank > 1);
  if (pair) {
    EXPECT_EQ(pair->backend(), "futureless");
    pair->barrier();
  }
}

RANK_TEST(CollectivesTest, RegisteredBackend, .world_size = 2,
          .not_on_device = "it names backends of the CPU") {
  register_backend("mine", Futureless);
  const auto group = init_process_group({.backend = "mine"});
  EXPECT_EQ(group->backend(), "futureless");
  const at::Tensor sum = torch::ones({3});
  group->all_reduce(sum);
  EXPECT_EQ(sum[0].item<float>(), 2);
  EXPECT_THAT(ErrorOf<ConfigurationError>([] { register_backend("mine", Futureless); }),
              HasSubstr("the backend \"mine\" is registered already"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([] { register_backend("", Futureless); }),
              HasSubstr("needs a name"));
}

// The program makes the Gloo backend itself: there, too, different sizes do not end the process.
RANK_TEST(CollectivesTest, ConnectedBackend,
          ThreeRanks(/*not_on_device=*/"it names backends of the CPU")) {
  auto meeting = init_process_group();
  c10::intrusive_ptr<c10d::Backend> gloo =
      Gloo({.store = meeting->store(), .rank = meeting->rank(), .size = meeting->size()});
  ProcessGroup group(gloo, c10::make_intrusive<c10d::PrefixStore>("connected", meeting->store()));
  EXPECT_EQ(group.rank(), meeting->rank());
  EXPECT_EQ(group.size(), meeting->size());
  EXPECT_EQ(group.backend(), "gloo");
  const at::Tensor sum = torch::ones({3});
  group.all_reduce(sum);
  EXPECT_EQ(sum[0].item<float>(), static_cast<float>(group.size()));
  EXPECT_THAT(ErrorOf<CommunicationError>([&] {
                group.new_group({0, 1, 2});
              }),
              HasSubstr("was made of one connected backend"));
  EXPECT_THAT(
      ErrorOf<CommunicationError>([&] { group.all_reduce(torch::ones({group.rank() + 1})); }),
      HasSubstr("different size"));
  EXPECT_THAT(ErrorOf<CommunicationError>([&] { group.renew(); }),
              HasSubstr("was made of one connected backend"));
  meeting->barrier();
}

TEST(CollectivesOfOneTest, CopyAndAreComplete) {
  ProcessGroup group(c10::make_intrusive<c10d::HashStore>(), ProcessGroup::Place(),
                     {.backend = "gloo"});
  const at::Tensor input = torch::arange(4, at::kFloat);
  const at::Tensor output = Strided(torch::zeros({4}));
  group.all_gather(output, input);
  EXPECT_TRUE(at::equal(output, input));
  output.zero_();
  group.reduce_scatter(output, input, ReduceOp::kAverage);
  EXPECT_TRUE(at::equal(output, input));
  output.zero_();
  group.all_to_all(output, input, {4}, {4});
  EXPECT_TRUE(at::equal(output, input));
  Work work = group.all_reduce_async(output, ReduceOp::kAverage);
  EXPECT_TRUE(work.completed());
  work.wait();
  EXPECT_TRUE(at::equal(output, input));
  group.broadcast(output);
  group.barrier_async().wait();
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { group.send(input, 0); }),
              HasSubstr("no messages for itself"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { group.recv(output, 1); }),
              HasSubstr("there is no rank 1"));
}

TEST(OwnBackendTest, BackendThatDoesNotFitIsRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const ProcessGroup::Place place;
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                ProcessGroup(store, place,
                             {.make_backend = [](const BackendRequest&) { return nullptr; }});
              }),
              HasSubstr("make_backend returned no backend"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                ProcessGroup(store, place, {.backend = "gloo", .make_backend = Futureless});
              }),
              HasSubstr("choose one of them"));
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { ProcessGroup(c10::intrusive_ptr<c10d::Backend>(), store); }),
              HasSubstr("is null"));
}

}  // namespace
}  // namespace ddp
