#include "ddp/comm/host_group/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

// `ulimit -f 1024`: no SIGXFSZ.
TEST(SegmentTest, ALimitOfFileSizesIsAnError) {
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = 1 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto segment = Segment::Make(2);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(segment.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(segment.status().message().find("ulimit -f"), absl::string_view::npos);
}

UniqueFd Duplicate(const Segment& segment) {
  return UniqueFd(::fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0));
}

TEST(SegmentTest, BothMappingsShowTheSameMemory) {
  const auto made = Segment::Make(3);
  ASSERT_TRUE(made.ok()) << made.status();
  const auto mapped = Segment::Map(Duplicate(**made), 3);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ((*mapped)->size(), 3);
  for (int member = 0; member < 3; ++member) {
    (*made)->row(member).signals = 10 + member;
    for (int half = 0; half < 2; ++half) {
      std::memset((*made)->staging(member, half), 2 * member + half, kStagingBytes);
    }
    for (int to = 0; to < 3; ++to) {
      (*made)->mailbox(member, to).written = 100 * member + to;
      std::memset(Segment::Data((*made)->mailbox(member, to)), 0x40 + 3 * member + to,
                  Segment::kMailboxCapacity);
    }
  }
  // Any overlap of two parts would show as the value of the later one.
  for (int member = 0; member < 3; ++member) {
    EXPECT_EQ((*mapped)->row(member).signals, 10 + member);
    for (int half = 0; half < 2; ++half) {
      EXPECT_EQ((*mapped)->staging(member, half)[0], std::byte(2 * member + half));
      EXPECT_EQ((*mapped)->staging(member, half)[kStagingBytes - 1], std::byte(2 * member + half));
    }
    for (int to = 0; to < 3; ++to) {
      EXPECT_EQ((*mapped)->mailbox(member, to).written, 100 * member + to);
      EXPECT_EQ(Segment::Data((*mapped)->mailbox(member, to))[Segment::kMailboxCapacity - 1],
                std::byte(0x40 + 3 * member + to));
    }
  }
}

TEST(SegmentTest, ANewSegmentHasNoMembersAndNoEnd) {
  const auto segment = Segment::Make(2);
  ASSERT_TRUE(segment.ok()) << segment.status();
  EXPECT_EQ((*segment)->header().end, 0);
  for (int member = 0; member < 2; ++member) {
    const MemberRow& row = (*segment)->row(member);
    EXPECT_EQ(row.state, static_cast<uint32_t>(MemberState::kAbsent));
    EXPECT_EQ(row.signals, 0);
    EXPECT_EQ(row.sleepers, 0);
    EXPECT_EQ(row.touching, 0);
  }
}

TEST(SegmentTest, TheFileCannotShrinkUnderAPeer) {
  const auto segment = Segment::Make(2);
  ASSERT_TRUE(segment.ok()) << segment.status();
  EXPECT_EQ(::ftruncate((*segment)->fd(), 0), -1);
  EXPECT_EQ(::ftruncate((*segment)->fd(), 1 << 30), -1);
  EXPECT_EQ(::fcntl((*segment)->fd(), F_GETFD), FD_CLOEXEC);
}

TEST(SegmentTest, PrefaultLeavesTheOtherMembersAlone) {
  const auto segment = Segment::Make(2);
  ASSERT_TRUE(segment.ok()) << segment.status();
  std::memset((*segment)->staging(0, 0), 1, 2 * kStagingBytes);
  (*segment)->Prefault(1);
  EXPECT_EQ((*segment)->staging(0, 1)[kStagingBytes - 1], std::byte{1});
  (*segment)->Prefault(0);
  EXPECT_EQ((*segment)->staging(0, 0)[0], std::byte{0});
}

// The kernel takes a page from the NUMA node of the thread that touches the page first.
TEST(SegmentTest, EachMemberTouchesItsOwnStagingBuffersFirst) {
  const auto segment = Segment::Make(128);
  ASSERT_TRUE(segment.ok()) << segment.status();
  const auto bytes = [&] {
    struct stat file {};
    EXPECT_EQ(::fstat((*segment)->fd(), &file), 0);
    return static_cast<size_t>(file.st_blocks) * 512;
  };
  const size_t table = bytes();
  EXPECT_LE(table, size_t{512} << 10) << "the maker touches the table alone";
  (*segment)->Prefault(77);
  EXPECT_EQ(bytes(), table + 2 * kStagingBytes);
}

TEST(SegmentTest, ImpossibleSizesAreRefused) {
  for (const int size : {-1, 0, kMaxMembers + 1}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Segment::Make(size).status())) << size;
  }
  const auto largest = Segment::Make(kMaxMembers);
  ASSERT_TRUE(largest.ok()) << largest.status();
  Segment::Data((*largest)->mailbox(kMaxMembers - 1,
                                    kMaxMembers - 1))[Segment::kMailboxCapacity - 1] = std::byte{1};
}

TEST(SegmentTest, OtherFilesAreRefused) {
  const auto segment = Segment::Make(3);
  ASSERT_TRUE(segment.ok()) << segment.status();
  // A group of another size.
  EXPECT_FALSE(Segment::Map(Duplicate(**segment), 2).ok());
  EXPECT_FALSE(Segment::Map(UniqueFd(), 3).ok());
  // A file that could shrink, and would then end this process by SIGBUS.
  const off_t bytes = ::lseek((*segment)->fd(), 0, SEEK_END);
  UniqueFd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), bytes), 0);
  UniqueFd other(::fcntl(unsealed.get(), F_DUPFD_CLOEXEC, 0));
  EXPECT_TRUE(absl::IsFailedPrecondition(Segment::Map(std::move(unsealed), 3).status()));
  // The right size and seal, and nothing in it.
  ASSERT_EQ(::fcntl(other.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(Segment::Map(std::move(other), 3).status()));
}

}  // namespace
}  // namespace ddp::internal
