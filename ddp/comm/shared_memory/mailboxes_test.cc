#include "ddp/comm/shared_memory/mailboxes.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/host_group/segment.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// One member, without an engine: the test says when it advances.
struct Member {
  explicit Member(std::shared_ptr<HostGroup> group)
      : group(std::move(group)), mailboxes(this->group.get()) {}

  // Returns the place of the status of a message: empty until it is complete.
  std::shared_ptr<std::optional<absl::Status>> Send(int to, uint64_t tag,
                                                    std::span<const std::byte> data,
                                                    int64_t deadline_ns = kNever) {
    auto result = std::make_shared<std::optional<absl::Status>>();
    mailboxes.Send(to, tag, data, deadline_ns,
                   [result](const absl::Status& status) { *result = status; });
    return result;
  }
  std::shared_ptr<std::optional<absl::Status>> Receive(int from, uint64_t tag,
                                                       std::span<std::byte> data,
                                                       int64_t deadline_ns = kNever) {
    auto result = std::make_shared<std::optional<absl::Status>>();
    mailboxes.Receive(from, tag, data, deadline_ns,
                      [result](const absl::Status& status) { *result = status; });
    return result;
  }

  bool Advance() {
    Mailboxes::Finished finished;
    const bool moved = mailboxes.Advance(finished);
    for (auto& [done, status] : finished) done(status);
    return moved;
  }
  bool FailHopeless(int64_t now_ns) {
    Mailboxes::Finished finished;
    const bool late = mailboxes.FailHopeless(now_ns, finished);
    for (auto& [done, status] : finished) done(status);
    return late;
  }

  std::shared_ptr<HostGroup> group;
  Mailboxes mailboxes;
};

class MailboxesTest : public ::testing::Test {
 protected:
  MailboxesTest() : members_(3) {
    ::ddp::testing::FakeGroupStore store;
    ::ddp::testing::RunThreads(3, [&](int member) {
      auto entry = GroupEntry::Run(store, {.member = member, .size = 3});
      ASSERT_TRUE(entry.ok()) << entry.status();
      members_[member] = std::make_unique<Member>(*std::move(entry));
    });
  }

  Member& at(int member) { return *members_[member]; }

  // Advances all members until nothing moves.
  void Settle() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (const auto& member : members_) moved = (member && member->Advance()) || moved;
    }
  }

  std::vector<std::unique_ptr<Member>> members_;
};

std::vector<std::byte> Bytes(size_t count, int seed) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = std::byte(i * 31 + i / 251 + seed);
  return bytes;
}

TEST_F(MailboxesTest, MessagesOfEverySizeArrive) {
  for (const size_t count :
       {size_t{0}, size_t{1}, size_t{17}, Segment::kMailboxCapacity - 16,
        Segment::kMailboxCapacity - 15, Segment::kMailboxCapacity, size_t{1'000'003}}) {
    const std::vector<std::byte> sent = Bytes(count, 5);
    std::vector<std::byte> got(count);
    const auto sending = at(0).Send(1, 7, sent);
    const auto receiving = at(1).Receive(0, 7, got);
    Settle();
    ASSERT_TRUE(sending->has_value() && (*sending)->ok()) << count;
    ASSERT_TRUE(receiving->has_value() && (*receiving)->ok()) << count;
    EXPECT_EQ(got, sent);
  }
  EXPECT_TRUE(at(0).mailboxes.empty());
  EXPECT_TRUE(at(1).mailboxes.empty());
}

TEST_F(MailboxesTest, ASmallMessageNeedsNoReceiver) {
  const std::vector<std::byte> small = Bytes(100, 1);
  const std::vector<std::byte> large = Bytes(100'000, 1);
  const auto first = at(0).Send(1, 7, small);
  const auto second = at(0).Send(1, 7, large);
  Settle();
  EXPECT_TRUE(first->has_value());
  EXPECT_FALSE(second->has_value());
}

TEST_F(MailboxesTest, AMemberMaySendToItself) {
  const std::vector<std::byte> sent = Bytes(200'000, 3);
  std::vector<std::byte> got(sent.size());
  const auto sending = at(2).Send(2, 7, sent);
  const auto receiving = at(2).Receive(2, 7, got);
  Settle();
  EXPECT_TRUE(sending->has_value() && receiving->has_value());
  EXPECT_EQ(got, sent);
}

TEST_F(MailboxesTest, ReceivesTakeMessagesByTag) {
  const std::vector<std::byte> one = Bytes(300'000, 1);
  const std::vector<std::byte> two = Bytes(10, 2);
  std::vector<std::byte> got_one(one.size());
  std::vector<std::byte> got_two(two.size());
  const auto sending = at(0).Send(1, 1, one);
  (void)at(0).Send(1, 2, two);
  const auto second = at(1).Receive(0, 2, got_two);
  Settle();
  EXPECT_TRUE(sending->has_value());  // kept by member 1
  EXPECT_TRUE(second->has_value());
  const auto first = at(1).Receive(0, 1, got_one);
  Settle();
  EXPECT_TRUE(first->has_value());
  EXPECT_EQ(got_one, one);
  EXPECT_EQ(got_two, two);
}

// The receive is added while the first message of its tag comes in and is kept.
TEST_F(MailboxesTest, AReceiveTakesTheOldestMessageAlsoOneUnderWay) {
  const std::vector<std::byte> first = Bytes(200'000, 1);
  const std::vector<std::byte> second = Bytes(200'000, 2);
  std::vector<std::byte> other(1);
  std::vector<std::byte> got(first.size());
  std::vector<std::byte> got_later(second.size());
  (void)at(0).Send(1, 1, first);
  (void)at(0).Send(1, 1, second);
  (void)at(1).Receive(0, 9, other);
  at(0).Advance();
  at(1).Advance();
  const auto receiving = at(1).Receive(0, 1, got);
  Settle();
  ASSERT_TRUE(receiving->has_value());
  EXPECT_EQ(got, first);
  const auto later = at(1).Receive(0, 1, got_later);
  Settle();
  ASSERT_TRUE(later->has_value());
  EXPECT_EQ(got_later, second);
}

TEST_F(MailboxesTest, AnotherSizeFailsTheReceiveAlone) {
  for (const size_t count : {size_t{0}, size_t{9}, size_t{11}, size_t{100'000}}) {
    const std::vector<std::byte> sent = Bytes(count, 1);
    std::vector<std::byte> got(10, std::byte{1});
    const auto sending = at(0).Send(1, 1, sent);
    const auto receiving = at(1).Receive(0, 1, got);
    Settle();
    ASSERT_TRUE(sending->has_value() && receiving->has_value()) << count;
    EXPECT_TRUE((*sending)->ok());
    EXPECT_TRUE(absl::IsInvalidArgument(**receiving));
    EXPECT_THAT(got, Each(std::byte{1}));
  }
  // The next one is in step.
  const std::vector<std::byte> sent = Bytes(10, 1);
  std::vector<std::byte> got(10);
  (void)at(0).Send(1, 1, sent);
  const auto receiving = at(1).Receive(0, 1, got);
  Settle();
  EXPECT_TRUE(receiving->has_value() && (*receiving)->ok());
  EXPECT_EQ(got, sent);
}

TEST_F(MailboxesTest, WhatAMemberSentBeforeItLeftArrives) {
  const std::vector<std::byte> sent = Bytes(50'000, 1);
  std::vector<std::byte> got(sent.size());
  std::vector<std::byte> more(1);
  const auto receiving = at(1).Receive(0, 1, got);
  EXPECT_FALSE(at(1).Advance());
  const auto sending = at(0).Send(1, 1, sent);
  at(0).Advance();
  ASSERT_TRUE(sending->has_value());
  members_[0].reset();
  // The message came, and the member left, since the last Advance().
  EXPECT_FALSE(at(1).FailHopeless(0));
  EXPECT_FALSE(receiving->has_value());
  Settle();
  ASSERT_TRUE(receiving->has_value());
  EXPECT_TRUE((*receiving)->ok()) << **receiving;
  EXPECT_EQ(got, sent);
  // No more will come, and none can be sent.
  const auto hopeless = at(1).Receive(0, 1, more);
  const std::vector<std::byte> large(100'000);
  const auto to_nobody = at(1).Send(0, 1, large);
  Settle();
  EXPECT_FALSE(at(1).FailHopeless(0));
  ASSERT_TRUE(hopeless->has_value() && to_nobody->has_value());
  EXPECT_THAT((*hopeless)->message(), HasSubstr("rank 0 of the host has left"));
  EXPECT_TRUE(absl::IsUnavailable(**to_nobody));
  EXPECT_TRUE(at(1).mailboxes.empty());
}

TEST_F(MailboxesTest, ADeadlineNamesTheMember) {
  std::vector<std::byte> got(1);
  const std::vector<std::byte> large(100'000);
  const auto receiving = at(1).Receive(0, 1, got, 100);
  const auto later = at(1).Receive(0, 2, got, 200);
  const auto sending = at(1).Send(2, 1, large, 300);
  Settle();
  EXPECT_EQ(at(1).mailboxes.earliest_deadline_ns(), 100);
  EXPECT_FALSE(at(1).FailHopeless(99));
  EXPECT_TRUE(at(1).FailHopeless(100));
  ASSERT_TRUE(receiving->has_value());
  EXPECT_TRUE(absl::IsDeadlineExceeded(**receiving));
  EXPECT_THAT((*receiving)->message(), HasSubstr("rank 0"));
  EXPECT_EQ(at(1).mailboxes.earliest_deadline_ns(), 200);
  EXPECT_TRUE(at(1).FailHopeless(300));
  EXPECT_TRUE(later->has_value());
  ASSERT_TRUE(sending->has_value());
  EXPECT_THAT((*sending)->message(), HasSubstr("rank 2"));
  EXPECT_TRUE(at(1).mailboxes.empty());
}

TEST_F(MailboxesTest, FailAllFailsEachOnce) {
  std::vector<std::byte> got(100'000);
  const std::vector<std::byte> large(100'000);
  const auto receiving = at(1).Receive(0, 1, got);
  const auto sending = at(1).Send(2, 1, large);
  (void)at(0).Send(1, 1, large);
  at(0).Advance();
  at(1).Advance();
  Mailboxes::Finished finished;
  at(1).mailboxes.FailAll(absl::CancelledError("test"), finished);
  EXPECT_EQ(finished.size(), 2);
  for (auto& [done, status] : finished) done(status);
  EXPECT_TRUE(absl::IsCancelled(**receiving));
  EXPECT_TRUE(absl::IsCancelled(**sending));
  EXPECT_TRUE(at(1).mailboxes.empty());
  EXPECT_FALSE(at(1).Advance());
}

// Random messages between all pairs, in random steps: each tag is a queue.
TEST_F(MailboxesTest, RandomTrafficArrivesInTheOrderOfItsTag) {
  std::mt19937 random(7);
  for (int round = 0; round < 30; ++round) {
    struct Message {
      std::vector<std::byte> sent;
      std::vector<std::byte> got;
      std::shared_ptr<std::optional<absl::Status>> result;
    };
    std::vector<std::unique_ptr<Message>> messages;
    struct Posting {
      int from, to;
      uint64_t tag;
      Message* message;
    };
    std::vector<Posting> receives;
    for (int i = 0; i < 40; ++i) {
      const int from = static_cast<int>(random() % 3);
      const int to = static_cast<int>(random() % 3);
      const uint64_t tag = random() % 3;
      const size_t count = random() % 4 == 0 ? random() % 150'000 : random() % 100;
      messages.push_back(std::make_unique<Message>());
      Message& message = *messages.back();
      message.sent = Bytes(count, i);
      message.got.resize(count);
      (void)at(from).Send(to, tag, message.sent);
      receives.push_back({from, to, tag, &message});
    }
    // Receives of one tag are posted in the order of the sends, others in any order.
    std::stable_sort(receives.begin(), receives.end(), [&](const Posting& a, const Posting& b) {
      return (a.tag * 7 + round) % 3 < (b.tag * 7 + round) % 3;
    });
    for (const Posting& posting : receives) {
      posting.message->result =
          at(posting.to).Receive(posting.from, posting.tag, posting.message->got);
      for (uint32_t step = random() % 4; step > 0; --step) {
        at(static_cast<int>(random() % 3)).Advance();
      }
    }
    Settle();
    for (const auto& message : messages) {
      ASSERT_TRUE(message->result->has_value());
      ASSERT_TRUE((*message->result)->ok()) << **message->result;
      ASSERT_EQ(message->got, message->sent);
    }
  }
}

}  // namespace
}  // namespace ddp::internal
