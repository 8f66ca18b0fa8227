#include "ddp/comm/arena/peer_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include "ddp/comm/arena/arena.h"

namespace ddp::internal {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

UniqueFd CopyOf(int fd) { return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

class PeerArenaTest : public ::testing::Test {
 protected:
  Arena arena_{64 * kMiB};
};

TEST_F(PeerArenaTest, APeerReadsAndWritesTheBlocks) {
  auto peer = PeerArena::Map(CopyOf(arena_.fd()), arena_.reservation());
  ASSERT_TRUE(peer.ok()) << peer.status();
  const auto demand = arena_.AddDemand({.gradient_bytes = {kMiB, kMiB}});
  ASSERT_TRUE(demand.ok());
  auto* const first = static_cast<unsigned char*>(arena_.Allocate(kMiB));
  auto* const second = static_cast<unsigned char*>(arena_.Allocate(kMiB));
  second[7] = 1;
  std::byte* const seen = (*peer)->At(*arena_.BlockAt(second, kMiB), kMiB);
  ASSERT_NE(seen, nullptr);
  EXPECT_EQ(seen[7], std::byte{1});
  seen[8] = std::byte{2};
  EXPECT_EQ(second[8], 2);
  arena_.Free(first);
  arena_.Free(second);
}

TEST_F(PeerArenaTest, AnotherProcessWrites) {
  const auto demand = arena_.AddDemand({.gradient_bytes = {kMiB}});
  ASSERT_TRUE(demand.ok());
  auto* const block = static_cast<unsigned char*>(arena_.Allocate(kMiB));
  const uint64_t offset = *arena_.BlockAt(block, kMiB);
  block[0] = 1;
  const pid_t pid = fork();
  if (pid == 0) {
    auto peer = PeerArena::Map(CopyOf(arena_.fd()), arena_.reservation());
    if (!peer.ok()) _exit(1);
    std::byte* const seen = (*peer)->At(offset, kMiB);
    if (seen[0] != std::byte{1}) _exit(2);
    std::memset(seen, 2, kMiB);
    _exit(block[0] == 1 || block[0] == 2 ? 0 : 3);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(block[0], 2);
  EXPECT_EQ(block[kMiB - 1], 2);
  arena_.Free(block);
}

TEST_F(PeerArenaTest, NumbersOfThePeerAreChecked) {
  const auto peer = PeerArena::Map(CopyOf(arena_.fd()), arena_.reservation());
  ASSERT_TRUE(peer.ok());
  EXPECT_EQ((*peer)->size(), 64 * kMiB);
  EXPECT_EQ((*peer)->At(0, (*peer)->size()), (*peer)->base());
  EXPECT_EQ((*peer)->At((*peer)->size(), 0), (*peer)->base() + (*peer)->size());
  EXPECT_EQ((*peer)->At(0, (*peer)->size() + 1), nullptr);
  EXPECT_EQ((*peer)->At(1, (*peer)->size()), nullptr);
  EXPECT_EQ((*peer)->At((*peer)->size() + 1, 0), nullptr);
  EXPECT_EQ((*peer)->At(~uint64_t{0}, 2), nullptr);
  EXPECT_EQ((*peer)->At(2, ~uint64_t{0}), nullptr);
}

TEST_F(PeerArenaTest, ReleasedMemoryLeavesThePeersMappingToo) {
  auto peer = PeerArena::Map(CopyOf(arena_.fd()), arena_.reservation());
  ASSERT_TRUE(peer.ok());
  {
    const auto demand = arena_.AddDemand({.gradient_bytes = {kMiB}});
    ASSERT_TRUE(demand.ok());
    std::memset((*peer)->base(), 5, kMiB);
  }
  EXPECT_EQ((*peer)->base()[0], std::byte{0});
}

TEST_F(PeerArenaTest, AProcessMapsAnArenaOnce) {
  Arena other(kMiB);
  auto first = PeerArena::Map(CopyOf(arena_.fd()), arena_.reservation());
  auto second = PeerArena::Map(CopyOf(arena_.fd()), arena_.reservation());
  auto of_other = PeerArena::Map(CopyOf(other.fd()), other.reservation());
  ASSERT_TRUE(first.ok() && second.ok() && of_other.ok());
  EXPECT_EQ(*first, *second);
  EXPECT_NE(*first, *of_other);
  const std::weak_ptr<const PeerArena> mapped = *first;
  first = second = of_other;
  EXPECT_TRUE(mapped.expired()) << "unmapped with the last group";
  EXPECT_FALSE(PeerArena::Map(CopyOf(arena_.fd()), 2 * arena_.reservation()).ok());
  EXPECT_FALSE(PeerArena::Map(UniqueFd(), kMiB).ok());
}

TEST_F(PeerArenaTest, OtherDescriptorsAreRefused) {
  const auto code = [](UniqueFd fd, size_t reservation) {
    return PeerArena::Map(std::move(fd), reservation).status().code();
  };
  EXPECT_EQ(code(UniqueFd(), kMiB), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(CopyOf(arena_.fd()), 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(CopyOf(arena_.fd()), 2 * arena_.reservation()),
            absl::StatusCode::kInvalidArgument);
  UniqueFd unsealed(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), kMiB), 0);
  EXPECT_EQ(code(std::move(unsealed), kMiB), absl::StatusCode::kInvalidArgument);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  close(pipe[1]);
  EXPECT_EQ(code(UniqueFd(pipe[0]), kMiB), absl::StatusCode::kInvalidArgument);
}

TEST_F(PeerArenaTest, AForkedChildDoesNotInheritTheMapping) {
  auto peer = PeerArena::Map(CopyOf(arena_.fd()), arena_.reservation());
  ASSERT_TRUE(peer.ok());
  const pid_t pid = fork();
  if (pid == 0) {
    // The addresses are free, so the child's own mapping may get them.
    void* const own = mmap((*peer)->base(), 4096, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (own != (*peer)->base()) _exit(1);
    peer->reset();
    *static_cast<volatile char*>(own) = 1;  // still mapped
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace ddp::internal
