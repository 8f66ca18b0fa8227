#include "store/tcp_store/tcp_store_state.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "store/tcp_store/tcp_store_protocol.h"

namespace ddp::store {
namespace {

using Q = TcpStoreQuery;
using Texts = std::vector<std::string>;

std::string Number(int64_t number) {
  std::string out;
  AppendNumber(out, number);
  return out;
}

std::string Text(const std::string& text) {
  std::string out;
  AppendString(out, text);
  return out;
}

const std::string kReadyByte(1, kReady);
const std::string kNotReadyByte(1, kNotReady);
const std::string kStop(1, kStopWaiting);
const std::string kCanceled(1, kWaitCanceled);

class TcpStoreStateTest : public ::testing::Test {
 protected:
  TcpStoreStateTest() {
    for (uint64_t client = 1; client <= 5; ++client) {
      state_.Connect(client);
      EXPECT_TRUE(Try(client, Q::kValidate, {}, {}, kTcpStoreMagic).ok());
    }
  }

  absl::Status Try(uint64_t client, Q query, const Texts& keys = {}, const Texts& values = {},
                   int64_t number = 0) {
    TcpStoreState::Replies replies;
    const absl::Status status = state_.Handle(
        client, {.query = query, .keys = keys, .values = values, .number = number}, replies);
    Take(replies);
    return status;
  }

  // Handles a request of `client` and returns all its replies since the last call.
  std::string Ask(uint64_t client, Q query, const Texts& keys = {}, const Texts& values = {},
                  int64_t number = 0) {
    EXPECT_TRUE(Try(client, query, keys, values, number).ok());
    return Told(client);
  }

  std::string Told(uint64_t client) { return std::exchange(told_[client], {}); }

  void Disconnect(uint64_t client) {
    TcpStoreState::Replies replies;
    state_.Disconnect(client, replies);
    Take(replies);
  }

  void Take(const TcpStoreState::Replies& replies) {
    for (const auto& reply : replies) told_[reply.client] += reply.bytes;
  }

  TcpStoreLimits limits_;
  TcpStoreState state_{&limits_};
  std::map<uint64_t, std::string> told_;
};

TEST_F(TcpStoreStateTest, OnlyWhoIsValidatedIsAnswered) {
  state_.Connect(9);
  EXPECT_FALSE(state_.IsValidated(9));
  EXPECT_TRUE(absl::IsInvalidArgument(Try(9, Q::kKeyCount)));
  EXPECT_TRUE(absl::IsInvalidArgument(Try(9, Q::kValidate, {}, {}, kTcpStoreMagic + 1)));
  EXPECT_TRUE(Try(9, Q::kValidate, {}, {}, kTcpStoreMagic).ok());
  EXPECT_TRUE(state_.IsValidated(9));
  EXPECT_EQ(Ask(9, Q::kPing, {}, {}, 0x01020304), "\x04\x03\x02\x01");
  EXPECT_TRUE(absl::IsInvalidArgument(Try(9, Q::kValidate, {}, {}, kTcpStoreMagic)));
}

TEST_F(TcpStoreStateTest, ValuesAreSetReadCountedAndDeleted) {
  EXPECT_EQ(Ask(1, Q::kSet, {"a"}, {"1"}), "");
  EXPECT_EQ(Ask(2, Q::kGet, {"a"}), Text("1"));
  EXPECT_EQ(Ask(2, Q::kGet, {"none"}), Text(""));
  EXPECT_EQ(Ask(1, Q::kAppend, {"a"}, {"2"}), "");
  EXPECT_EQ(Ask(1, Q::kAppend, {"b"}, {"x"}), "");
  EXPECT_EQ(Ask(1, Q::kMultiSet, {"c", "d"}, {"3", ""}), "");
  EXPECT_EQ(Ask(1, Q::kMultiGet, {"d", "a", "c", "a"}),
            Text("") + Text("12") + Text("3") + Text("12"));
  EXPECT_EQ(Ask(1, Q::kKeyCount), Number(4));
  EXPECT_EQ(Ask(1, Q::kCheck, {"a", "d"}), kReadyByte);
  EXPECT_EQ(Ask(1, Q::kCheck, {"a", "none"}), kNotReadyByte);
  EXPECT_EQ(Ask(1, Q::kCheck), kReadyByte);
  EXPECT_EQ(Ask(1, Q::kDelete, {"a"}), Number(1));
  EXPECT_EQ(Ask(1, Q::kDelete, {"a"}), Number(0));
  EXPECT_EQ(Ask(1, Q::kKeyCount), Number(3));
  for (const char* key : {"b", "c"}) Ask(1, Q::kDelete, {key});
  EXPECT_EQ(Ask(1, Q::kListKeys), Number(1) + Text("d"));
  Ask(1, Q::kDelete, {"d"});
  EXPECT_EQ(state_.stored_bytes(), 0u);
}

TEST_F(TcpStoreStateTest, CompareSetHasFourCases) {
  EXPECT_EQ(Ask(1, Q::kCompareSet, {"k"}, {"x", "new"}), Text("x"));
  EXPECT_EQ(Ask(1, Q::kCheck, {"k"}), kNotReadyByte);
  EXPECT_EQ(Ask(1, Q::kCompareSet, {"k"}, {"", "one"}), Text("one"));
  EXPECT_EQ(Ask(1, Q::kCompareSet, {"k"}, {"x", "two"}), Text("one"));
  EXPECT_EQ(Ask(1, Q::kCompareSet, {"k"}, {"one", "two"}), Text("two"));
  EXPECT_EQ(Ask(1, Q::kGet, {"k"}), Text("two"));
}

TEST_F(TcpStoreStateTest, AddCountsAndRefusesWhatIsNoNumber) {
  EXPECT_EQ(Ask(1, Q::kAdd, {"n"}, {}, 5), Number(5));
  EXPECT_EQ(Ask(2, Q::kAdd, {"n"}, {}, -7), Number(-2));
  EXPECT_EQ(Ask(2, Q::kGet, {"n"}), Text("-2"));
  EXPECT_EQ(Ask(1, Q::kAdd, {"max"}, {}, INT64_MAX), Number(INT64_MAX));
  const absl::Status beyond = Try(1, Q::kAdd, {"max"}, {}, 1);
  EXPECT_TRUE(absl::IsInvalidArgument(beyond)) << beyond;
  Ask(1, Q::kSet, {"text\n"}, {"12abc"});
  const absl::Status text = Try(1, Q::kAdd, {"text\n"}, {}, 1);
  EXPECT_EQ(text.message(), "add: the value of 'text\\n' is not a number");
}

TEST_F(TcpStoreStateTest, WaitEndsWhenTheLastKeyComes) {
  EXPECT_EQ(Ask(1, Q::kWait), kStop);
  Ask(1, Q::kSet, {"here"}, {"1"});
  EXPECT_EQ(Ask(1, Q::kWait, {"here", "a", "b", "a"}), "");
  Ask(2, Q::kSet, {"a"}, {"1"});
  EXPECT_EQ(Told(1), "");
  Ask(2, Q::kAdd, {"b"}, {}, 1);
  EXPECT_EQ(Told(1), kStop);
  Ask(2, Q::kSet, {"b"}, {"again"});
  EXPECT_EQ(Told(1), "") << "told once";
  EXPECT_EQ(Ask(1, Q::kCancelWait), kCanceled) << "also too late";
}

TEST_F(TcpStoreStateTest, EveryWaiterOfAValueIsWoken) {
  for (uint64_t client = 1; client <= 4; ++client) EXPECT_EQ(Ask(client, Q::kWait, {"k"}), "");
  Ask(5, Q::kCompareSet, {"k"}, {"", "v"});
  for (uint64_t client = 1; client <= 4; ++client) EXPECT_EQ(Told(client), kStop);
}

TEST_F(TcpStoreStateTest, AWaitWantsAllKeysAtOnce) {
  EXPECT_EQ(Ask(1, Q::kWait, {"a", "b"}), "");
  Ask(2, Q::kSet, {"a"}, {"1"});
  Ask(2, Q::kDelete, {"a"});
  Ask(2, Q::kSet, {"b"}, {"1"});
  EXPECT_EQ(Told(1), "") << "a is gone again";
  Ask(2, Q::kMultiSet, {"a"}, {"1"});
  EXPECT_EQ(Told(1), kStop);
}

TEST_F(TcpStoreStateTest, CanceledWaitsAreForgotten) {
  const size_t before = state_.stored_bytes();
  EXPECT_EQ(Ask(1, Q::kWait, {"a", "b"}), "");
  EXPECT_GT(state_.stored_bytes(), before);
  EXPECT_TRUE(absl::IsInvalidArgument(Try(1, Q::kWait, {"c"}))) << "one wait at a time";
  EXPECT_EQ(Ask(1, Q::kCancelWait), kCanceled);
  EXPECT_EQ(state_.stored_bytes(), before);
  EXPECT_EQ(Ask(3, Q::kWait, {"a"}), "");
  Disconnect(3);
  EXPECT_EQ(state_.stored_bytes(), before);
  Ask(2, Q::kMultiSet, {"a", "b"}, {"1", "1"});
  EXPECT_EQ(Told(1) + Told(3), "");
}

TEST_F(TcpStoreStateTest, QueuesAreFirstInFirstOutAndNoKeys) {
  EXPECT_EQ(Ask(1, Q::kQueueLength, {"q"}), Number(0));
  EXPECT_EQ(Ask(1, Q::kQueuePop, {"q"}), Number(0));
  EXPECT_EQ(Ask(1, Q::kQueuePush, {"q"}, {"a"}), "");
  Ask(2, Q::kQueuePush, {"q"}, {""});
  EXPECT_EQ(Ask(1, Q::kQueueLength, {"q"}), Number(2));
  EXPECT_EQ(Ask(1, Q::kCheck, {"q"}), kReadyByte);
  EXPECT_EQ(Ask(1, Q::kWait, {"q"}), kStop);
  EXPECT_EQ(Ask(1, Q::kKeyCount), Number(0));
  EXPECT_EQ(Ask(1, Q::kDelete, {"q"}), Number(0));
  EXPECT_EQ(Ask(1, Q::kGet, {"q"}), Text(""));
  Ask(1, Q::kSet, {"q"}, {"value"});
  EXPECT_EQ(Ask(2, Q::kQueuePop, {"q"}), Number(2) + Text("a"));
  EXPECT_EQ(Ask(1, Q::kQueuePop, {"q"}), Number(1) + Text(""));
  EXPECT_EQ(Ask(1, Q::kCheck, {"q"}), kReadyByte) << "the value is still there";
  Ask(1, Q::kDelete, {"q"});
  EXPECT_EQ(Ask(1, Q::kCheck, {"q"}), kNotReadyByte);
  EXPECT_EQ(state_.stored_bytes(), 0u);
}

TEST_F(TcpStoreStateTest, OneElementEndsOneWait) {
  for (uint64_t client = 1; client <= 3; ++client) Ask(client, Q::kWait, {"q"});
  Ask(4, Q::kQueuePush, {"q"}, {"a"});
  EXPECT_EQ(Told(1) + "|" + Told(2) + "|" + Told(3), kStop + "||");
  EXPECT_EQ(Ask(1, Q::kQueuePop, {"q"}), Number(1) + Text("a"));
  EXPECT_EQ(Told(2), "");
  Ask(4, Q::kQueuePush, {"q"}, {"b"});
  Ask(4, Q::kQueuePush, {"q"}, {"c"});
  EXPECT_EQ(Told(2) + Told(3), kStop + kStop);
  EXPECT_EQ(Ask(3, Q::kQueuePop, {"q"}), Number(2) + Text("b"));
  EXPECT_EQ(Ask(2, Q::kQueuePop, {"q"}), Number(1) + Text("c"));
}

TEST_F(TcpStoreStateTest, AnElementThatIsNotTakenIsOfferedToTheNext) {
  for (uint64_t client = 1; client <= 3; ++client) Ask(client, Q::kWait, {"q"});
  Ask(4, Q::kQueuePush, {"q"}, {"a"});
  EXPECT_EQ(Told(1), kStop);
  Disconnect(1);
  EXPECT_EQ(Told(2), kStop) << "the first died with it";
  EXPECT_EQ(Ask(2, Q::kKeyCount), Number(0));
  EXPECT_EQ(Told(3), kStop) << "the second does something else";
  EXPECT_EQ(Ask(3, Q::kQueuePop, {"q"}), Number(1) + Text("a"));
}

TEST_F(TcpStoreStateTest, AValueWakesThoseWhoWaitAtAQueueOfItsName) {
  Ask(1, Q::kWait, {"q"});
  Ask(2, Q::kWait, {"q"});
  Ask(3, Q::kWait, {"q", "other"});
  Ask(4, Q::kQueuePush, {"q"}, {"a"});
  EXPECT_EQ(Told(1) + "|" + Told(2), kStop + "|");
  Ask(4, Q::kSet, {"q"}, {"v"});
  EXPECT_EQ(Told(2), kStop);
  EXPECT_EQ(Told(3), "");
  Ask(4, Q::kSet, {"other"}, {"v"});
  EXPECT_EQ(Told(3), kStop);
}

TEST(TcpStoreStateLimitsTest, HoldsTheLimits) {
  const TcpStoreLimits limits = {
      .max_value_bytes = 100, .max_reply_bytes = 150, .max_stored_bytes = 2000};
  TcpStoreState state(&limits);
  TcpStoreState::Replies replies;
  state.Connect(1);
  const auto handle = [&](Q query, const Texts& keys, const Texts& values, int64_t number = 0) {
    return state.Handle(1, {.query = query, .keys = keys, .values = values, .number = number},
                        replies);
  };
  ASSERT_TRUE(handle(Q::kValidate, {}, {}, kTcpStoreMagic).ok());
  ASSERT_TRUE(handle(Q::kAppend, {"a"}, {std::string(60, 'x')}).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(handle(Q::kAppend, {"a"}, {std::string(60, 'x')})));
  EXPECT_TRUE(absl::IsResourceExhausted(handle(Q::kMultiGet, {"a", "a", "a"}, {})));
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) {
    status = handle(Q::kQueuePush, {"q"}, {std::to_string(i)});
  }
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_LE(state.stored_bytes(), limits.max_stored_bytes);
  EXPECT_TRUE(
      absl::IsResourceExhausted(handle(Q::kWait, {"1", "2", "3", "4", "5", "6", "7", "8"}, {})));
  EXPECT_TRUE(handle(Q::kGet, {"a"}, {}).ok()) << "reading goes on";
}

// Random requests of random clients. The counted bytes must return to 0, and a client whose awaited
// keys are present must have its reply.
TEST(TcpStoreStateRandomTest, NothingIsLostOrLeft) {
  const TcpStoreLimits limits;
  TcpStoreState state(&limits);
  std::mt19937 random(3);
  std::map<uint64_t, bool> waits;
  uint64_t next = 1;
  TcpStoreState::Replies replies;
  const auto connect = [&] {
    state.Connect(next);
    ASSERT_TRUE(
        state.Handle(next, {.query = Q::kValidate, .number = kTcpStoreMagic}, replies).ok());
    waits[next++] = false;
  };
  for (int i = 0; i < 8; ++i) connect();
  const auto key = [&] { return std::string(1, static_cast<char>('a' + random() % 4)); };
  for (int round = 0; round < 50000; ++round) {
    auto client = std::next(waits.begin(), static_cast<long>(random() % waits.size()));
    const uint64_t id = client->first;
    replies.clear();
    const Q query = static_cast<Q>(1 + random() % 17);
    if (client->second && query == Q::kWait) continue;
    if (random() % 50 == 0) {
      waits.erase(client);
      state.Disconnect(id, replies);
      connect();
    } else {
      TcpStoreRequest request = {.query = query, .keys = {key()}, .values = {}, .number = 1};
      if (query == Q::kWait || query == Q::kCheck) request.keys.push_back(key());
      if (query == Q::kWait) client->second = true;
      if (query == Q::kCancelWait) client->second = false;
      const int values = query == Q::kCompareSet ? 2
                         : query == Q::kSet || query == Q::kAppend || query == Q::kMultiSet ||
                                 query == Q::kQueuePush
                             ? 1
                             : 0;
      for (int i = 0; i < values; ++i) request.values.push_back(std::to_string(random() % 3));
      ASSERT_TRUE(state.Handle(id, request, replies).ok());
    }
    for (const auto& reply : replies) {
      if (reply.client == id && query != Q::kWait) continue;
      EXPECT_EQ(reply.bytes, kStop);
      EXPECT_TRUE(waits.at(reply.client)) << "told without having asked";
      waits.at(reply.client) = false;
    }
  }
  for (const auto& [id, waiting] : waits) state.Disconnect(id, replies);
  state.Connect(next);
  ASSERT_TRUE(state.Handle(next, {.query = Q::kValidate, .number = kTcpStoreMagic}, replies).ok());
  for (const char* name : {"a", "b", "c", "d"}) {
    ASSERT_TRUE(state.Handle(next, {.query = Q::kDelete, .keys = {name}}, replies).ok());
    for (int i = 0; i < 50000; ++i) {
      replies.clear();
      ASSERT_TRUE(state.Handle(next, {.query = Q::kQueuePop, .keys = {name}}, replies).ok());
      if (replies[0].bytes == Number(0)) break;
    }
  }
  EXPECT_EQ(state.stored_bytes(), 0u);
}

}  // namespace
}  // namespace ddp::store
