// Tests process groups on real processes, over Redis and over LibTorch's TCPStore: ranks that fail,
// die, leave or are busy, and everything else about a group that needs several ranks.
//
// Length: one case for each way in which a group fails or ends, all on the same helpers.
#include "ddp/process_group.h"

#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/meeting/c10d_group_store.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis_store/redis_store.h"
#include "testing/ranks/rank_test.h"
#include "testing/redis/redis_fixture.h"

namespace ddp {
namespace {

using internal::Communicator;
using internal::FailureMonitor;

using ::ddp::testing::RankStore;
using ::ddp::testing::RankTestOptions;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::chrono::seconds kDeadline{60};

template <typename Error>
std::string ErrorOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

// Every case runs over Redis, as under ddprun, and over a TCPStore that rank 0 serves, as under
// torchrun.
RankTestOptions InBothStores(RankTestOptions options) {
  options.stores = {RankStore::kRedis, RankStore::kTcpStore};
  options.environment.try_emplace("TORCH_DISTRIBUTED_DEBUG", "");  // removes an inherited one
  return options;
}

// Returns the rank that a PeerFailedError names; -1 without one.
int PeerOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const PeerFailedError& error) {
    return error.rank();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return -2;
  }
  return -1;
}

// Waits until another thread has read the failure report.
void AwaitReport(const ProcessGroup& group) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + absl::FromChrono(kDeadline);
  while (!group.failed() && clock.Now() < deadline) std::this_thread::yield();
  ASSERT_TRUE(group.failed()) << "no news of a failure";
}

// Waits until `rank` has answered this many questions where it is.
void AwaitAnswers(const ProcessGroup& group, int rank, int64_t count) {
  const std::string key = absl::StrCat("ddp/control/where/", rank);
  const auto answers = [&] { return std::stoll(group.store()->get_to_str(key)); };
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + absl::FromChrono(kDeadline);
  group.store()->wait({key}, kDeadline);
  while (answers() < count && clock.Now() < deadline) std::this_thread::yield();
  ASSERT_GE(answers(), count);
}

// Returns when every rank is here, through the store. A rank that fails next then interrupts no
// collective that it has itself completed.
void MeetInStore(ProcessGroup& group, const std::string& name) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < group.size(); ++rank) keys.push_back(absl::StrCat(name, "/", rank));
  group.store()->set(keys[group.rank()], "1");
  group.store()->wait(keys, kDeadline);
}

void ExpectSum(ProcessGroup& group) {
  const at::Tensor sum = torch::full({1000}, group.rank() + 1.0F);
  group.all_reduce(sum);
  const float expected = static_cast<float>(group.size() * (group.size() + 1)) / 2;
  EXPECT_TRUE(at::equal(sum, torch::full({1000}, expected))) << sum[0];
}

// The host waits for the sum on a device too.
void AllReduce(ProcessGroup& group, const at::Tensor& tensor) {
  group.all_reduce(tensor);
  group.to_host(tensor);
}

RANK_TEST(ProcessGroupTest, RenewsAfterEachFailure, InBothStores({3})) {
  const auto group = init_process_group();
  EXPECT_EQ(group->incarnation(), 0);
  for (int round = 0; round < 3; ++round) {
    const std::string reason = absl::StrCat("bad batch in round ", round);
    if (group->rank() == round) {
      group->report_failure(reason);
      EXPECT_TRUE(group->failed());
      EXPECT_THAT(ErrorOf<CommunicationError>([&] { group->barrier(); }), HasSubstr(reason));
    } else {
      const std::string text =
          ErrorOf<PeerFailedError>([&] { AllReduce(*group, torch::ones({4})); });
      EXPECT_THAT(text,
                  AllOf(HasSubstr(absl::StrCat("rank ", round, " failed")), HasSubstr(reason)));
    }
    group->ensure_usable();  // all ranks have thrown
    EXPECT_FALSE(group->failed());
    EXPECT_EQ(group->incarnation(), round + 1);
    ExpectSum(*group);
    group->ensure_usable();
    EXPECT_EQ(group->incarnation(), round + 1);
    MeetInStore(*group, absl::StrCat("round/", round));
  }
  group->barrier();
}

// Rank 0 is not in a collective when rank 1 fails.
RANK_TEST(ProcessGroupTest, RaisesOncePerFailure, InBothStores({2})) {
  const auto group = init_process_group();
  for (int round = 0; round < 2; ++round) {
    if (group->rank() == 1) {
      group->report_failure("out of memory");
    } else {
      AwaitReport(*group);
      EXPECT_THAT(ErrorOf<PeerFailedError>([&] { group->ensure_usable(); }),
                  AllOf(HasSubstr("rank 0: rank 1 failed"), HasSubstr("out of memory")));
    }
    group->ensure_usable();
    EXPECT_EQ(group->incarnation(), round + 1);
    ExpectSum(*group);
    MeetInStore(*group, absl::StrCat("round/", round));
  }
  group->barrier();
}

// No rank failed: the program requests a new communicator.
RANK_TEST(ProcessGroupTest, RenewsOnRequest, InBothStores({2})) {
  const auto group = init_process_group();
  ExpectSum(*group);
  MeetInStore(*group, "summed");
  group->renew();
  EXPECT_EQ(group->incarnation(), 1);
  ExpectSum(*group);
}

RANK_TEST(ProcessGroupTest, KilledPeerIsNamed, InBothStores({.world_size = 3, .killed_rank = 2})) {
  const auto group = init_process_group();
  ExpectSum(*group);
  MeetInStore(*group, "summed");
  if (group->rank() == 2) ::kill(::getpid(), SIGKILL);
  EXPECT_THAT(ErrorOf<CommunicationError>([&] { AllReduce(*group, torch::ones({4})); }),
              HasSubstr("all-reduce"));
  for (int again = 0; again < 3; ++again) {
    EXPECT_EQ(PeerOf([&] { group->ensure_usable(); }), 2);
  }
  EXPECT_THAT(ErrorOf<PeerFailedError>([&] { group->barrier(); }),
              AllOf(HasSubstr("cannot be used any more"), HasSubstr("rank 2 is gone"),
                    HasSubstr("no sign of life from rank 2")));
}

RANK_TEST(ProcessGroupTest, RankThatLeftIsNamed, InBothStores({3})) {
  auto group = init_process_group();
  const c10::intrusive_ptr<c10d::Store> store = group->store();
  if (group->rank() == 1) {
    store->wait({"connected/0", "connected/2"}, kDeadline);
    group->report_failure("gives up");
    group.reset();
    store->set("left", "1");
    store->wait({"seen/0", "seen/2"}, kDeadline);
    return;
  }
  store->set(absl::StrCat("connected/", group->rank()), "1");
  EXPECT_EQ(PeerOf([&] { group->barrier(); }), 1);
  store->wait({"left"}, kDeadline);
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  EXPECT_THAT(ErrorOf<PeerFailedError>([&] { group->ensure_usable(); }),
              AllOf(HasSubstr("rank 1 is gone"), HasSubstr("has left")));
  EXPECT_EQ(PeerOf([&] { group->renew(); }), 1);
  EXPECT_LT(clock.Now() - start, absl::Seconds(3)) << "waited as if it might be alive";
  store->set(absl::StrCat("seen/", group->rank()), "1");
  store->wait({"seen/0", "seen/2"}, kDeadline);  // rank 0 may be the store's server
}

// Rank 1 is busy until its process has answered two liveness inquiries. The second one comes later
// than the time limit for the answer to the first.
RANK_TEST(ProcessGroupTest, BusyPeerIsWaitedFor, InBothStores({3})) {
  const auto group = init_process_group();
  if (group->rank() == 1) {
    group->report_failure("has something to save first");
    AwaitAnswers(*group, 1, 2);
  } else {
    EXPECT_EQ(PeerOf([&] { group->barrier(); }), 1);
  }
  group->ensure_usable();
  EXPECT_EQ(group->incarnation(), 1);
  ExpectSum(*group);
}

// Rank 1 is alive and does not renew the group: the other ranks wait for the group's timeout.
RANK_TEST(ProcessGroupTest, AbsentPeerIsGivenUp, InBothStores({2})) {
  const auto group = init_process_group({.timeout = std::chrono::seconds(5)});
  if (group->rank() == 1) {
    group->report_failure("never comes back");
    group->store()->wait({"given_up"}, kDeadline);
    EXPECT_EQ(PeerOf([&] { group->ensure_usable(); }), 1) << "learns what the others decided";
    return;
  }
  EXPECT_EQ(PeerOf([&] { group->barrier(); }), 1);
  EXPECT_THAT(ErrorOf<PeerFailedError>([&] { group->ensure_usable(); }),
              AllOf(HasSubstr("rank 1 did not come back within 5s"),
                    HasSubstr("although the process is alive")));
  group->store()->set("given_up", "1");
}

// A rank leaves with operations in flight that the peer never joins; their tensors are freed
// already.
RANK_TEST(ProcessGroupTest, LeavesWithOperationsInFlight,
          InBothStores({.world_size = 2,
                        .not_on_device = "the end of a group waits there for its operations"})) {
  auto group = init_process_group();
  const c10::intrusive_ptr<c10d::Store> store = group->store();
  group->barrier();
  if (group->rank() == 0) {
    for (int i = 0; i < 3; ++i) group->all_reduce_async(torch::ones({100000}));
    Communicator::Pending pending = group->communicator().AllReduce(torch::ones({7}), "one more");
    group.reset();
    store->set("left", "1");
    store->wait({"done"}, kDeadline);
  } else {
    store->wait({"left"}, kDeadline);
    store->set("done", "1");
  }
}

// Operations in flight at a renewal do no harm to the new incarnation.
RANK_TEST(ProcessGroupTest, RenewsWithOperationsInFlight, InBothStores({2})) {
  const auto group = init_process_group();
  for (int round = 0; round < 2; ++round) {
    if (group->rank() == 0) {
      Communicator::Pending pending =
          group->communicator().AllReduce(torch::ones({100000}), "the lost one");
      group->store()->set(absl::StrCat("started/", round), "1");
      Communicator::Pending old = pending;
      EXPECT_EQ(PeerOf([&] {
                  group->communicator().Wait(pending);
                  group->to_host(pending.tensor);
                }),
                1);
      group->ensure_usable();
      EXPECT_THAT(ErrorOf<CommunicationError>([&] { group->communicator().Wait(old); }),
                  HasSubstr("the lost one was started before the process group was renewed"));
    } else {
      group->store()->wait({absl::StrCat("started/", round)}, kDeadline);
      group->report_failure("does not join");
      group->ensure_usable();
    }
    ExpectSum(*group);
    MeetInStore(*group, absl::StrCat("round/", round));
  }
  group->barrier();
}

RANK_TEST(ProcessGroupTest, KindsOfTensors,
          InBothStores({.world_size = 3,
                        .not_on_device = "sparse gradients are refused, as with NCCL"})) {
  const auto group = init_process_group();
  const int64_t rank = group->rank();

  const at::Tensor complex =
      at::complex(torch::full({3}, 1.0F), torch::full({3}, static_cast<float>(rank)));
  group->all_reduce(complex);
  EXPECT_TRUE(at::equal(at::real(complex), torch::full({3}, 3.0F)));
  EXPECT_TRUE(at::equal(at::imag(complex), torch::full({3}, 3.0F)));
  Work sum = group->all_reduce_async(complex);
  sum.wait();
  EXPECT_TRUE(sum.future()->value().toTensorVector().at(0).is_same(complex));
  const at::Tensor received = at::complex(torch::full({2}, rank * 1.0F), torch::full({2}, 5.0F));
  group->broadcast(received, 2);
  EXPECT_EQ(at::real(received).sum().item<float>(), 4);

  // Rank r has one entry of its own, and one that all ranks have, twice: not coalesced.
  const at::Tensor sparse =
      at::sparse_coo_tensor(at::tensor({rank, int64_t{9}, int64_t{9}}, at::kLong).view({1, 3}),
                            torch::ones({3, 2}), {10, 2});
  for (const bool async : {false, true}) {
    const at::Tensor mine = sparse.clone();
    if (async) {
      Work work = group->all_reduce_async(mine);
      work.wait();
      EXPECT_TRUE(work.future()->value().toTensorVector().at(0).is_same(mine));
    } else {
      group->all_reduce(mine);
    }
    const at::Tensor dense = mine.to_dense();
    EXPECT_EQ(dense[9][1].item<float>(), 2 * group->size());
    EXPECT_EQ(dense.slice(0, 0, 3).sum().item<float>(), 2 * group->size());
    EXPECT_EQ(dense.sum().item<float>(), 6 * group->size());
  }

  group->all_reduce(torch::zeros({0, 4}));
  EXPECT_TRUE(group->all_reduce_async(torch::zeros({0}))->completed());
  const at::Tensor least = torch::full({2}, rank, at::kLong);
  Communicator::Pending pending = group->communicator().AllReduceMax(least, "the maximum");
  group->communicator().Wait(pending);
  EXPECT_EQ(least[1].item<int64_t>(), 2);
  EXPECT_EQ(group->communicator().AllocateBuffer(8, at::kDouble).sum().item<double>(), 0);
}

// Comm hooks chain a continuation on the sum, and the library waits for it.
RANK_TEST(ProcessGroupTest, ChainsOnFutures, InBothStores({2})) {
  const auto group = init_process_group();
  Communicator& communicator = group->communicator();
  const at::Tensor tensor = torch::ones({4});
  const TensorFuture half = group->all_reduce_async(tensor).then(
      [](c10::ivalue::Future& sum) { return c10::IValue(sum.value().toTensorVector().at(0) / 2); },
      c10::TensorType::get());
  communicator.WaitFuture(half, {tensor}, {"the comm hook of bucket", 3});
  EXPECT_EQ(half->value().toTensor().sum().item<float>(), 2.0F * group->size());

  if (group->rank() == 0) {
    const TensorFuture broken = group->all_reduce_async(torch::ones({4}))
                                    .then(
                                        [](c10::ivalue::Future&) -> c10::IValue {
                                          throw std::runtime_error("out of luck");
                                        },
                                        c10::TensorType::get());
    EXPECT_THAT(
        ErrorOf<ReductionError>([&] {
          communicator.WaitFuture(broken, {}, {"the comm hook of bucket", 3});
        }),
        AllOf(HasSubstr("rank 0: the comm hook of bucket 3 failed"), HasSubstr("out of luck")));
  } else {
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] {
                  group->all_reduce(torch::ones({4}));
                  group->barrier();
                }),
                HasSubstr("out of luck"));
  }
  group->ensure_usable();
  ExpectSum(*group);
}

// A hook's future may never complete, also where there is no peer to ask.
RANK_TEST(ProcessGroupTest, AFutureTimesOutInAGroupOfOne, InBothStores({1})) {
  const auto group = init_process_group({.timeout = std::chrono::milliseconds(100)});
  const auto never = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  EXPECT_THAT(ErrorOf<CommunicationError>([&] {
                group->communicator().WaitFuture(never, {}, {"the comm hook of bucket", 0});
              }),
              HasSubstr("rank 0: the comm hook of bucket 0 failed: not all ranks came within "));
}

// Returns every rank's text, in rank order.
std::vector<std::string> TextsOfAll(ProcessGroup& group, const std::string& name,
                                    const std::string& mine) {
  group.store()->set(absl::StrCat(name, "/", group.rank()), mine);
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) {
    texts.push_back(group.store()->get_to_str(absl::StrCat(name, "/", rank)));
  }
  return texts;
}

RANK_TEST(ProcessGroupTest, MismatchesAreNamed,
          InBothStores({.world_size = 3, .environment = {{"TORCH_DISTRIBUTED_DEBUG", "DETAIL"}}})) {
  const auto group = init_process_group();
  ExpectSum(*group);
  group->barrier();
  const bool odd = group->rank() == 2;
  std::vector<std::pair<std::string, std::function<void()>>> cases = {
      {"they differ in shape", [&] { AllReduce(*group, torch::ones({odd ? 3 : 2})); }},
      {"they differ in dtype",
       [&] { group->all_reduce(torch::ones({2}, odd ? at::kDouble : at::kFloat)); }},
      {"they differ in root", [&] { group->broadcast(torch::ones({2}), odd ? 1 : 0); }},
      {"they differ in operation, shape",
       [&] {
         odd ? group->broadcast(torch::ones({2, 2})) : group->all_reduce(torch::ones({2}));
       }},
  };
  if (group->device().is_cpu()) {
    cases.emplace_back("they differ in layout", [&] {
      group->all_reduce(odd ? torch::ones({2}).to_sparse() : torch::ones({2}));
    });
  }
  for (const auto& [difference, action] : cases) {
    const std::string text = ErrorOf<CommunicationError>(action);
    EXPECT_THAT(
        text, AllOf(HasSubstr("Detected mismatch between collectives on ranks"),
                    HasSubstr("ranks 0, 1 run"), HasSubstr("rank 2 runs"), HasSubstr(difference)));
    for (const std::string& other : TextsOfAll(*group, difference, text)) EXPECT_EQ(other, text);
    group->ensure_usable();
    ExpectSum(*group);
  }
}

// Without the comparison of DETAIL. In LibTorch's Gloo alone, different sizes would end the
// process.
RANK_TEST(ProcessGroupTest, DifferentCollectivesAreNamed,
          InBothStores({.world_size = {2, 3},
                        .not_on_device =
                            "ranks in different collectives are named with shm and Gloo only"})) {
  const auto group = init_process_group();
  const bool odd = group->rank() == 1;
  const std::vector<std::pair<std::string, std::function<void()>>> cases = {
      {"tensors of different size", [&] { AllReduce(*group, torch::ones({odd ? 1000 : 2000})); }},
      {"tensors of different size", [&] { AllReduce(*group, torch::ones({odd ? 2000 : 1000})); }},
      {"of Double",
       [&] { group->all_reduce(torch::ones({1000}, odd ? at::kDouble : at::kFloat)); }},
      {"a broadcast from rank 1", [&] { group->broadcast(torch::ones({2}), odd ? 1 : 0); }},
      {"a broadcast from rank 0 (broadcast, 16 bytes of Float)",
       [&] { odd ? group->broadcast(torch::ones({4})) : group->all_reduce(torch::ones({2})); }},
      {"different numbers of batches",
       [&] { odd ? group->barrier() : group->all_reduce(torch::ones({1}, at::kInt)); }},
      {"rank 1 is in collective 1, a monitored barrier",
       [&] {
         odd ? group->monitored_barrier(std::chrono::minutes(30))
             : group->all_reduce(torch::ones({2}));
       }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& [difference, action] = cases[i];
    ExpectSum(*group);
    std::string text = ErrorOf<CommunicationError>(action);
    // A broadcast may be complete on a third rank.
    if (text == "no error") text = ErrorOf<CommunicationError>([&] { group->barrier(); });
    EXPECT_THAT(text, AllOf(HasSubstr("the ranks are in different"), HasSubstr("rank 1 is in "),
                            HasSubstr(group->size() == 2 ? "rank 0 is" : "rank"),
                            HasSubstr("collective 1, "), HasSubstr(difference)));
    group->ensure_usable();
    EXPECT_EQ(group->incarnation(), static_cast<int64_t>(i) + 1);
  }
  ExpectSum(*group);
}

// A rank that is late, or one operation ahead, is not an error, however long it takes.
RANK_TEST(ProcessGroupTest, LateRanksAreWaitedFor, InBothStores({3})) {
  const auto group = init_process_group();
  if (group->rank() == 1) {
    AwaitAnswers(*group, 0, 2);  // to two inquiries of the other ranks
    AwaitAnswers(*group, 1, 2);
  }
  ExpectSum(*group);
  group->barrier();
}

RANK_TEST(ProcessGroupTest, RankThatFinishedEarlyIsNamed, InBothStores({3})) {
  auto group = init_process_group();
  const c10::intrusive_ptr<c10d::Store> store = group->store();
  ExpectSum(*group);
  if (group->rank() == 1) {
    group.reset();  // as at the end of a program
    store->set("left", "1");
    store->wait({"seen/0", "seen/2"}, kDeadline);
    return;
  }
  std::string text;
  EXPECT_EQ(PeerOf([&] {
              try {
                AllReduce(*group, torch::ones({4}));
              } catch (const std::exception& error) {
                text = error.what();
                throw;
              }
            }),
            1);
  EXPECT_THAT(text, AllOf(HasSubstr("it has left the process group"),
                          HasSubstr("after 1 collectives"), HasSubstr("ddp::Join")));
  store->set(absl::StrCat("seen/", group->rank()), "1");
  store->wait({"seen/0", "seen/2"}, kDeadline);
}

// The death of one rank of four.
struct Death {
  int rank;
  bool in_collective;
  bool killed;  // false: it calls _exit(0)
};

// The survivors are in a collective, which breaks in some of them only because others gave up.
void SurvivorsNameTheDead(const Death& death) {
  const auto group = init_process_group();
  ExpectSum(*group);
  if (!death.in_collective) MeetInStore(*group, "summed");
  if (group->rank() == death.rank) {
    if (death.in_collective) group->all_reduce_async(torch::ones({1 << 20}));
    if (death.killed) ::kill(::getpid(), SIGKILL);
    _exit(0);
  }
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  std::string text;
  EXPECT_EQ(PeerOf([&] {
              try {
                // The first all-reduce may be complete before the rank dies.
                for (int i = 0; i < 3; ++i) AllReduce(*group, torch::ones({1 << 20}));
              } catch (const std::exception& error) {
                text = error.what();
                throw;
              }
            }),
            death.rank)
      << text;
  EXPECT_THAT(text, HasSubstr(absl::StrCat("because rank ", death.rank, " failed: ")));
  EXPECT_LT(clock.Now() - start, absl::Seconds(30));
  ::testing::Test::RecordProperty("named_ms",
                                  static_cast<int>(absl::ToInt64Milliseconds(clock.Now() - start)));
}

RANK_TEST(ProcessGroupTest, KilledInACollective,
          InBothStores({.world_size = 4, .killed_rank = 3})) {
  SurvivorsNameTheDead({.rank = 3, .in_collective = true, .killed = true});
}

RANK_TEST(ProcessGroupTest, KilledOutside, InBothStores({.world_size = 4, .killed_rank = 2})) {
  SurvivorsNameTheDead({.rank = 2, .in_collective = false, .killed = true});
}

RANK_TEST(ProcessGroupTest, Rank0KilledInACollective,
          InBothStores({.world_size = 4, .killed_rank = 0})) {
  SurvivorsNameTheDead({.rank = 0, .in_collective = true, .killed = true});
}

RANK_TEST(ProcessGroupTest, ExitsInACollective, InBothStores({4})) {
  SurvivorsNameTheDead({.rank = 1, .in_collective = true, .killed = false});
}

RANK_TEST(ProcessGroupTest, ExitsOutside, InBothStores({4})) {
  SurvivorsNameTheDead({.rank = 3, .in_collective = false, .killed = false});
}

RANK_TEST(ProcessGroupTest, DetailNamesTheAbsent,
          InBothStores({.world_size = 3, .environment = {{"TORCH_DISTRIBUTED_DEBUG", "DETAIL"}}})) {
  const auto group = init_process_group({.timeout = std::chrono::seconds(4)});
  ExpectSum(*group);
  if (group->rank() == 1) {
    AwaitReport(*group);
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] { group->ensure_usable(); }),
                HasSubstr("rank 1 did not come to collective 1 within 4s"));
  } else {
    EXPECT_THAT(ErrorOf<CommunicationError>([&] { AllReduce(*group, torch::ones({2})); }),
                HasSubstr("rank 1 did not come to collective 1 within 4s"));
  }
  group->ensure_usable();
  ExpectSum(*group);
}

// A rank must not hang in the comparison of DETAIL.
RANK_TEST(ProcessGroupTest, AReportEndsAComparison,
          InBothStores({.world_size = 2, .environment = {{"TORCH_DISTRIBUTED_DEBUG", "DETAIL"}}})) {
  const auto group = init_process_group();
  for (int round = 0; round < 2; ++round) {
    if (group->rank() == 1) {
      group->store()->wait({absl::StrCat("ddp/control/check/", round, "/0/0")}, kDeadline);
      group->report_failure("a peer waits in vain");
    } else {
      EXPECT_THAT(ErrorOf<PeerFailedError>([&] { AllReduce(*group, torch::ones({2})); }),
                  HasSubstr("a peer waits in vain"));
    }
    group->ensure_usable();
  }
  ExpectSum(*group);
}

RANK_TEST(ProcessGroupTest, BadDebugLevelIsRefused,
          InBothStores({.world_size = 1, .environment = {{"TORCH_DISTRIBUTED_DEBUG", "LOUD"}}})) {
  EXPECT_THAT(ErrorOf<ConfigurationError>([] { init_process_group(); }),
              HasSubstr("TORCH_DISTRIBUTED_DEBUG=\"LOUD\" is unknown; it is OFF, INFO or DETAIL"));
}

RANK_TEST(ProcessGroupTest, TheEnvironmentNamesTheBackend,
          InBothStores({.world_size = 2,
                        .environment = {{"DDP_BACKEND", "gloo"}},
                        .not_on_device = "it names backends of the CPU"})) {
  EXPECT_EQ(init_process_group()->backend(), "gloo");
  EXPECT_EQ(init_process_group({.backend = "shm"})->backend(), "shm") << "the option counts";
}

// Rank 0, which serves a TCPStore, keeps its first group while rank 1 connects the second one.
RANK_TEST(ProcessGroupTest, ARankIsEarlyWithTheNextGroup, InBothStores({2})) {
  auto first = init_process_group();
  if (first->rank() == 0) {
    EXPECT_ANY_THROW(first->store()->wait({"nobody sets this"}, std::chrono::milliseconds(500)));
  }
  first.reset();
  const auto second = init_process_group({.timeout = kDeadline});
  ExpectSum(*second);
}

RANK_TEST(ProcessGroupTest, AnUnknownBackendInTheEnvironmentIsRefused,
          InBothStores({.world_size = 1,
                        .environment = {{"DDP_BACKEND", "mpi"}},
                        .not_on_device = "it names backends of the CPU"})) {
  EXPECT_THAT(
      ErrorOf<ConfigurationError>([] { init_process_group(); }),
      HasSubstr(
          "backend \"mpi\" is unknown; there are shm, hierarchical, gloo, nccl and nccl-legacy"));
}

RANK_TEST(ProcessGroupTest, MonitoredBarrierNamesTheMissing, InBothStores({4})) {
  const auto group = init_process_group();
  const bool late = group->rank() % 2 == 1;
  group->monitored_barrier(kDeadline);
  for (const bool all : {false, true}) {
    const std::string done = absl::StrCat("done/", all);
    if (late) group->store()->wait({absl::StrCat(done, "/0"), absl::StrCat(done, "/2")}, kDeadline);
    const std::string text = ErrorOf<CommunicationError>(
        [&] { group->monitored_barrier(std::chrono::milliseconds(500), all); });
    EXPECT_THAT(text,
                HasSubstr(all ? "the monitored barrier failed: ranks 1, 3 did not come within "
                                "500ms"
                              : "the monitored barrier failed: rank 1 (and perhaps others) "
                                "did not come within 500ms"));
    group->store()->set(absl::StrCat(done, "/", group->rank()), "1");
  }
  group->monitored_barrier(kDeadline);
  ExpectSum(*group);
  MeetInStore(*group, "summed");

  if (group->rank() == 3) {
    group->report_failure("will not come");
  } else {
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] { group->monitored_barrier(kDeadline); }),
                HasSubstr("will not come"));
  }
  group->ensure_usable();
  group->monitored_barrier(kDeadline);
  group->barrier();
}

RANK_TEST(ProcessGroupTest, GroupsOfSomeRanks, InBothStores({4})) {
  const auto group = init_process_group();
  const int rank = group->rank();
  for (int round = 0; round < 2; ++round) {
    const auto even = group->new_group({2, 0});
    const auto odd = group->new_group({1, 3});
    EXPECT_EQ(even == nullptr, rank % 2 == 1);
    EXPECT_EQ(odd == nullptr, rank % 2 == 0);
    ProcessGroup& mine = even ? *even : *odd;
    EXPECT_EQ(mine.size(), 2);
    EXPECT_EQ(mine.rank(), rank / 2);
    EXPECT_EQ(mine.backend(), group->backend());
    const at::Tensor sum = torch::full({3}, rank, at::kLong);
    mine.all_reduce(sum);
    EXPECT_EQ(sum[0].item<int64_t>(), rank % 2 == 0 ? 2 : 4);
    MeetInStore(mine, "summed");
    if (rank == 3) mine.report_failure("of the odd ones only");
    if (rank == 1) {
      EXPECT_EQ(PeerOf([&] { mine.barrier(); }), 1);
    }
    mine.ensure_usable();
    EXPECT_EQ(mine.incarnation(), rank % 2);
    ExpectSum(mine);
  }
  const auto alone = group->new_group({rank});
  ExpectSum(*alone);
  EXPECT_FALSE(group->failed());
  ExpectSum(*group);
  for (const std::vector<int>& bad : std::vector<std::vector<int>>{{}, {0, 0}, {0, 4}, {-1}}) {
    EXPECT_THAT(ErrorOf<ConfigurationError>([&] { group->new_group(bad); }),
                HasSubstr("needs different ranks of 0 to 3, at least one"));
  }
  group->barrier();
}

// Two hosts of two ranks each, as far as the group knows.
RANK_TEST(ProcessGroupTest, GroupsOfSomeRanksKnowTheirHosts,
          InBothStores({.world_size = 4,
                        .environment = {{"DDP_BACKEND", ""}},
                        .not_on_device = "it names backends of the CPU"})) {
  const auto world = init_process_group();
  const int rank = world->rank();
  ProcessGroup group(c10::make_intrusive<c10d::PrefixStore>("hosts", world->store()),
                     {.rank = rank, .size = 4, .local_rank = rank % 2, .local_size = 2});
  EXPECT_EQ(group.backend(), "hierarchical");
  const std::vector<std::pair<std::vector<int>, std::string>> groups = {
      {{0, 1}, "shm"}, {{2, 3}, "shm"}, {{1, 2}, "gloo"}, {{0, 1, 2}, "hierarchical"}};
  for (const auto& [ranks, backend] : groups) {
    const auto some = group.new_group(ranks);
    if (some == nullptr) continue;
    EXPECT_EQ(some->backend(), backend);
    ExpectSum(*some);
  }
  group.barrier();
  world->barrier();
}

// Rank 1 alone hears of the failure, and passes it on to its other groups.
RANK_TEST(ProcessGroupTest, AFailureThatIsPassedOnKeepsTheRankAtFault, InBothStores({3})) {
  const auto group = init_process_group();
  const int rank = group->rank();
  const auto left = group->new_group({0, 1});
  const auto right = group->new_group({1, 2});
  if (rank == 2) right->report_failure("a bad record");
  if (rank == 1) {
    AwaitReport(*right);
    ProcessGroup::report_failure_to({left.get(), group.get(), right.get()}, "the pair has failed");
  }
  if (rank == 0) {
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] { group->barrier(); }),
                AllOf(HasSubstr("rank 2 failed"), HasSubstr("a bad record")));
    EXPECT_THAT(ErrorOf<CommunicationError>([&] { left->barrier(); }),
                HasSubstr("rank 2, which is not in this process group, failed: a bad record"));
  }
  if (rank == 2) {
    AwaitReport(*group);
    EXPECT_THAT(ErrorOf<CommunicationError>([&] { group->barrier(); }), HasSubstr("a bad record"));
  }
  for (ProcessGroup* each : {left.get(), right.get(), group.get()}) {
    if (each == nullptr) continue;
    each->ensure_usable();
    ExpectSum(*each);
  }
  group->barrier();
}

// Makes some groups and ends them. Returns by how many keys the store has grown, as rank 0 sees it.
int64_t KeysLeftByGroups(ProcessGroup& group) {
  group.barrier();
  const int64_t before = group.store()->getNumKeys();
  group.barrier();
  for (const std::vector<int>& ranks : std::vector<std::vector<int>>{{0, 1, 2, 3}, {1, 2}, {3}}) {
    const auto part = group.new_group(ranks);
    if (part != nullptr) part->barrier();
  }
  group.barrier();  // all groups have ended on all ranks
  at::Tensor grown = torch::full({1}, group.store()->getNumKeys() - before, at::kLong);
  group.broadcast(grown, 0);
  return grown.item<int64_t>();
}

// A program that makes groups again and again must not fill the store. On a slow machine a rank
// that waits for more than a second asks its peers where they are, which leaves a few keys: a round
// without such a question is looked for.
RANK_TEST(ProcessGroupTest, GroupsLeaveNoKeys,
          InBothStores({.world_size = 4,
                        .not_on_device = "the simulated backend leaves keys in the store"})) {
  const auto group = init_process_group();
  int64_t left = KeysLeftByGroups(*group);
  for (int round = 1; round < 20 && left != 0; ++round) left = KeysLeftByGroups(*group);
  EXPECT_EQ(left, 0);
}

// Failures and renewals of one group do not reach the other, in whatever order they end.
void ConnectTwice() {
  auto first = init_process_group();
  ExpectSum(*first);
  MeetInStore(*first, "summed");
  if (first->rank() == 1) {
    first->report_failure("of the first group");
  } else {
    EXPECT_EQ(PeerOf([&] { first->barrier(); }), 1);
  }
  first->ensure_usable();
  EXPECT_EQ(first->incarnation(), 1);

  auto second = init_process_group();
  EXPECT_FALSE(second->failed());
  EXPECT_EQ(second->incarnation(), 0);
  ExpectSum(*second);
  ExpectSum(*first);
  MeetInStore(*second, "summed");
  first.reset();
  second->renew();
  EXPECT_EQ(second->incarnation(), 1);
  ExpectSum(*second);

  // A TCPStore ends with its last group on rank 0, where another rank may just be connecting.
  if (std::getenv("DDP_STORE") == nullptr) return;
  second.reset();
  const auto third = init_process_group();
  ExpectSum(*third);
  MeetInStore(*third, "summed");
  third->renew();
  EXPECT_EQ(third->incarnation(), 1);
  ExpectSum(*third);
}

RANK_TEST(ProcessGroupTest, ConnectsTwiceInOneProcess, InBothStores({2})) { ConnectTwice(); }

RANK_TEST(ProcessGroupTest, ConnectsTwiceInOneProcessWithGloo,
          InBothStores({.world_size = 2,
                        .environment = {{"DDP_BACKEND", "gloo"}},
                        .not_on_device = "only the backend differs from another case's"})) {
  ConnectTwice();
}

// torchrun's agent serves one store to all attempts of a job.
RANK_TEST(ProcessGroupTest, KeysOfAnAttemptBeforeATorchrunRestartAreNotRead,
          RankTestOptions({.world_size = 2,
                           .stores = {RankStore::kTcpStore},
                           .not_on_device = "it names backends of the CPU"})) {
  const int rank = std::stoi(std::getenv("RANK"));
  const auto connect = [](bool serves) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
    options.isServer = serves;
    options.waitWorkers = false;
    return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  };
  const auto server = rank == 0 ? connect(true) : nullptr;
  const auto store = connect(false);
  {
    ProcessGroup earlier(
        store, ProcessGroup::Place{.rank = rank, .size = 2, .local_rank = rank, .local_size = 2});
    ExpectSum(earlier);
  }
  ASSERT_EQ(setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1), 0);
  auto group = init_process_group();
  EXPECT_EQ(group->backend(), "shm");
  ExpectSum(*group);
  group.reset();
  store->set(absl::StrCat("done/", rank), std::vector<uint8_t>());
  if (rank == 0) store->wait({"done/1"}, kDeadline);  // it serves, and ends after the other one
}

// The child of fork() ends its copy of the group, as a program does that returns from its training
// function. The peers must not take that for the end of the parent.
RANK_TEST(ProcessGroupTest, AForkedChildMayEndItsCopyOfTheGroup, InBothStores({2})) {
  auto group = init_process_group();
  ExpectSum(*group);
  MeetInStore(*group, "summed");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(30);  // ends a child that waits for a thread of the parent
    group.reset();
    ::_exit(0);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  MeetInStore(*group, "the children have ended");
  ExpectSum(*group);
  MeetInStore(*group, "summed again");
  group->renew();
  EXPECT_EQ(group->incarnation(), 1);
  ExpectSum(*group);
}

// The process that serves the store, or a peer, ends: the message is plain, without a stack trace.
RANK_TEST(ProcessGroupTest, RenewalFailsInPlainWords, InBothStores({2})) {
  const auto group = init_process_group();
  group->barrier();
  if (group->rank() == 0) _exit(0);
  const std::string text = ErrorOf<CommunicationError>([&] { group->renew(); });
  EXPECT_THAT(text, HasSubstr("rank 1: the process group "));
  EXPECT_THAT(text, Not(HasSubstr("frame #")));
  EXPECT_THAT(text, Not(HasSubstr("Exception raised from")));
}

RANK_TEST(ProcessGroupTest, AnExceptionIsToldToThePeers, InBothStores({2})) {
  try {
    const auto group = init_process_group();
    MeetInStore(*group, "here");
    if (group->rank() == 1) throw std::runtime_error("of the program");
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] { AllReduce(*group, torch::ones({2})); }),
                HasSubstr("an exception ended the program of rank 1"));
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "of the program");
  }
}

// Returns the server's clients, by the names that they set, except the asking client.
std::map<std::string, int> Clients(store::RedisConnection& server) {
  const auto list = server.Command({"CLIENT", "LIST"});
  const std::string text = list->AsString().value();
  std::map<std::string, int> clients;
  for (const auto line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    for (const auto word : absl::StrSplit(line, ' ')) {
      if (absl::StartsWith(word, "name=") && word != "name=observer") {
        ++clients[std::string(absl::StripPrefix(word, "name="))];
      }
    }
  }
  return clients;
}

// Every rank has one connection: rank 0 asks the server while all ranks are there.
RANK_TEST(ProcessGroupTest, HoldsOneConnection, InBothStores({4})) {
  const auto group = init_process_group();
  const char* const url = std::getenv("DDP_STORE");
  if (url == nullptr) {  // LibTorch decides how many connections a TCPStore has
    group->barrier();
    return;
  }
  std::map<std::string, int> one_each;
  for (int rank = 0; rank < group->size(); ++rank) one_each[absl::StrCat("ddp-rank-", rank)] = 1;
  store::RedisConnectionOptions options;
  options.client_name = "observer";
  const auto server =
      *store::RedisConnection::Connect(store::ParseStoreAddress(url)->endpoint, options);
  const auto expect_one_each = [&](const std::string& when) {
    MeetInStore(*group, when);
    EXPECT_EQ(Clients(*server), one_each) << when;
    MeetInStore(*group, when + ", seen");
  };
  expect_one_each("when connected");
  std::vector<std::shared_ptr<ProcessGroup>> groups;
  for (int i = 0; i < 3; ++i) {
    groups.push_back(group->new_group({0, 1, 2}));
    if (groups.back() != nullptr) ExpectSum(*groups.back());
  }
  expect_one_each("with more groups");
  if (group->rank() == 1) group->report_failure("on purpose");
  AwaitReport(*group);
  expect_one_each("when a failure is known");
  if (group->rank() != 1) {
    EXPECT_EQ(PeerOf([&] { group->barrier(); }), 1);
  }
  group->ensure_usable();
  ExpectSum(*group);
  group->monitored_barrier(kDeadline);
  expect_one_each("after a renewal");
  groups.clear();
  expect_one_each("with one group again");
  group->barrier();
}

// A failure report needs two commands to the store for any number of ranks: one log entry, one list
// of keys.
TEST(FailureMonitorTest, AReportDoesNotGrowWithTheGroup) {
  const auto redis = ::ddp::testing::RedisFixture::Start();
  const auto store = store::RedisStore::connect(store::FormatStoreAddress(redis->Address("many")));
  constexpr int kRanks = 4000;
  FailureMonitor first(internal::MakeGroupStore(store), {.rank = 0, .size = kRanks});
  FailureMonitor last(internal::MakeGroupStore(store), {.rank = kRanks - 1, .size = kRanks});
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  first.Report("does not fit");
  const absl::Duration reported = clock.Now() - start;
  const auto failure = last.AwaitFailure(absl::FromChrono(kDeadline));
  const absl::Duration heard = clock.Now() - start;
  ASSERT_TRUE(failure.has_value());
  EXPECT_EQ(failure->rank, 0);
  EXPECT_EQ(failure->reason, "does not fit");
  EXPECT_LT(reported, absl::Seconds(1));  // about 10 ms; one command per rank would take far longer
  RecordProperty("reported_ms", static_cast<int>(absl::ToInt64Milliseconds(reported)));
  RecordProperty("heard_ms", static_cast<int>(absl::ToInt64Milliseconds(heard)));
}

// A group of one rank hardly uses the store, and fails and recovers alone.
TEST(ProcessGroupOfOneTest, FailsAndRenews) {
  ProcessGroup group(c10::make_intrusive<c10d::HashStore>(), {});
  ExpectSum(group);
  group.report_failure("alone");
  EXPECT_THAT(ErrorOf<CommunicationError>([&] { group.barrier(); }), HasSubstr("alone"));
  group.ensure_usable();
  EXPECT_EQ(group.incarnation(), 1);
  ExpectSum(group);
  group.monitored_barrier(kDeadline);
}

}  // namespace
}  // namespace ddp
