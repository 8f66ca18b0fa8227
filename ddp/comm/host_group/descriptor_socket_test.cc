#include "ddp/comm/host_group/descriptor_socket.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>

#include <array>
#include <atomic>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::RunThreads;

constexpr absl::Duration kTimeout = absl::Seconds(60);

std::string NewName() {
  static std::atomic<int> count = 0;
  return absl::StrCat("ddp-descriptor-socket-test-", ::getpid(), "-", ++count);
}

struct Pair {
  UniqueFd one;
  UniqueFd other;
};

Pair Connect() {
  const std::string name = NewName();
  auto listener = ListenAt(name, 4);
  EXPECT_TRUE(listener.ok()) << listener.status();
  auto one = ConnectTo(name, kTimeout);
  EXPECT_TRUE(one.ok()) << one.status();
  auto other = Accept(listener->get(), kTimeout);
  EXPECT_TRUE(other.ok()) << other.status();
  return {.one = *std::move(one), .other = *std::move(other)};
}

std::vector<std::byte> Bytes(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = std::byte(i * 7);
  return bytes;
}

TEST(DescriptorSocketTest, BytesAndDescriptorsArrive) {
  const Pair pair = Connect();
  EXPECT_TRUE(CheckSameUser(pair.other.get()).ok());
  std::vector<UniqueFd> files;
  std::vector<int> numbers;
  for (size_t i = 0; i < kMaxDescriptors; ++i) {
    files.emplace_back(::memfd_create("test", MFD_CLOEXEC));
    ASSERT_EQ(::ftruncate(files.back().get(), static_cast<off_t>(i)), 0);
    numbers.push_back(files.back().get());
  }
  const std::vector<std::byte> sent = Bytes(5);
  ASSERT_TRUE(SendAll(pair.one.get(), sent, numbers, kTimeout).ok());
  std::vector<std::byte> received(5);
  const auto found = ReceiveAll(pair.other.get(), received, kMaxDescriptors, kTimeout);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(received, sent);
  for (size_t i = 0; i < kMaxDescriptors; ++i) {
    struct stat file {};
    ASSERT_EQ(::fstat((*found)[i].get(), &file), 0);
    EXPECT_EQ(file.st_size, static_cast<off_t>(i));
    EXPECT_EQ(::fcntl((*found)[i].get(), F_GETFD), FD_CLOEXEC);
  }
}

TEST(DescriptorSocketTest, MoreBytesThanTheSocketHoldsArriveInOrder) {
  const Pair pair = Connect();
  const std::vector<std::byte> sent = Bytes(5'000'000);
  std::vector<std::byte> received(sent.size());
  RunThreads(
      1, [&](int) { EXPECT_TRUE(SendAll(pair.one.get(), sent, {}, kTimeout).ok()); },
      [&] { EXPECT_TRUE(ReceiveAll(pair.other.get(), received, 0, kTimeout).ok()); });
  EXPECT_EQ(received, sent);
}

TEST(DescriptorSocketTest, AnotherNumberOfDescriptorsIsAnError) {
  const Pair pair = Connect();
  const std::vector<std::byte> sent = Bytes(1);
  std::vector<std::byte> received(1);
  ASSERT_TRUE(SendAll(pair.one.get(), sent, {}, kTimeout).ok());
  EXPECT_TRUE(absl::IsDataLoss(ReceiveAll(pair.other.get(), received, 1, kTimeout).status()));
  const int fd = pair.one.get();
  ASSERT_TRUE(SendAll(pair.one.get(), sent, std::span(&fd, 1), kTimeout).ok());
  EXPECT_TRUE(absl::IsDataLoss(ReceiveAll(pair.other.get(), received, 0, kTimeout).status()));
  const int none = -1;
  EXPECT_FALSE(SendAll(pair.one.get(), sent, std::span(&none, 1), kTimeout).ok());
}

TEST(DescriptorSocketTest, AClosedConnectionIsAnError) {
  Pair pair = Connect();
  pair.one.reset();
  std::vector<std::byte> bytes = Bytes(100);
  EXPECT_TRUE(absl::IsUnavailable(ReceiveAll(pair.other.get(), bytes, 0, kTimeout).status()));
  EXPECT_FALSE(SendAll(pair.other.get(), bytes, {}, kTimeout).ok());  // and no SIGPIPE
}

TEST(DescriptorSocketTest, NobodyListens) {
  EXPECT_FALSE(ConnectTo(NewName(), kTimeout).ok());
  const std::string name = NewName();
  const auto listener = ListenAt(name, 1);
  ASSERT_TRUE(listener.ok());
  EXPECT_FALSE(ListenAt(name, 1).ok());
}

// A listener that does not accept, because its process is stopped.
TEST(DescriptorSocketTest, AFullBacklogEndsConnectAtItsTimeLimit) {
  const std::string name = NewName();
  const auto listener = ListenAt(name, 1);
  ASSERT_TRUE(listener.ok());
  std::vector<UniqueFd> others;
  while (true) {
    auto socket = ConnectTo(name, absl::Milliseconds(20));
    if (!socket.ok()) {
      EXPECT_TRUE(absl::IsDeadlineExceeded(socket.status())) << socket.status();
      break;
    }
    others.push_back(*std::move(socket));
    ASSERT_LT(others.size(), 100);
  }
}

TEST(DescriptorSocketTest, WaitsEndAtTheirTimeLimits) {
  const auto listener = ListenAt(NewName(), 1);
  ASSERT_TRUE(listener.ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(Accept(listener->get(), absl::ZeroDuration()).status()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(Accept(listener->get(), absl::Milliseconds(5)).status()));
  const Pair pair = Connect();
  std::vector<std::byte> bytes(2);
  ASSERT_TRUE(SendAll(pair.one.get(), std::span(bytes).first(1), {}, kTimeout).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(
      ReceiveAll(pair.other.get(), bytes, 0, absl::Milliseconds(5)).status()));
  std::vector<std::byte> many(10'000'000);
  EXPECT_TRUE(absl::IsDeadlineExceeded(SendAll(pair.one.get(), many, {}, absl::Milliseconds(5))));
}

// A profiler's timer, for example. A wait that began anew with each signal would never end.
TEST(DescriptorSocketTest, SignalsDoNotProlongAWait) {
  struct sigaction action = {};
  action.sa_handler = [](int) {};
  struct sigaction before = {};
  ASSERT_EQ(::sigaction(SIGALRM, &action, &before), 0);
  const itimerval each_millisecond = {.it_interval = {0, 1000}, .it_value = {0, 1000}};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &each_millisecond, nullptr), 0);
  const Pair pair = Connect();
  std::vector<std::byte> bytes(1);
  const absl::Time start = MonotonicClock().Now();
  EXPECT_TRUE(absl::IsDeadlineExceeded(
      ReceiveAll(pair.other.get(), bytes, 0, absl::Milliseconds(20)).status()));
  EXPECT_LT(MonotonicClock().Now() - start, kTimeout);
  const itimerval never = {};
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
}

}  // namespace
}  // namespace ddp::internal
