// Conformance tests of FileSystem on the real one and on the fake, and tests of the fake alone.
#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/file_system/posix_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_system/memory_file_system.h"
#include "testing/refused_calls.h"

namespace ddp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

using elastic::EntryKind;

struct Implementation {
  std::string name;
  std::function<std::unique_ptr<elastic::FileSystem>(const std::string& root)> make;
  // Makes a link at `path` to `target`, without the FileSystem interface.
  std::function<void(elastic::FileSystem&, const std::string& path, const std::string& target)>
      link;
};

std::string FreshFolder(const std::string& name) {
  std::string folder = absl::StrCat(::testing::TempDir(), "/", name, "XXXXXX");
  return mkdtemp(folder.data());
}

class FileSystemConformanceTest : public ::testing::TestWithParam<Implementation> {
 protected:
  FileSystemConformanceTest()
      : root_(GetParam().name == "Posix" ? FreshFolder("fs") : "/root"),
        file_system_(GetParam().make(root_)) {
    if (GetParam().name != "Posix") {
      EXPECT_TRUE(file_system_->MakeDirectory(root_).ok());
    }
  }

  std::string Path(const std::string& name) const { return absl::StrCat(root_, "/", name); }

  void Write(const std::string& name, const std::string& text) {
    auto file = file_system_->CreateFile(Path(name));
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE((*file)->Reserve(text.size()).ok());
    ASSERT_TRUE((*file)->Append(text.data(), text.size()).ok());
    ASSERT_TRUE((*file)->Sync().ok());
    ASSERT_TRUE((*file)->Close().ok());
  }

  std::string Read(const std::string& name) {
    auto file = file_system_->OpenFile(Path(name));
    if (!file.ok()) return absl::StrCat("error: ", file.status().ToString());
    std::string text((*file)->size(), '?');
    EXPECT_TRUE((*file)->Read(0, text.data(), text.size()).ok());
    return text;
  }

  void Link(const std::string& name, const std::string& target) {
    GetParam().link(*file_system_, Path(name), Path(target));
  }

  const std::string root_;
  const std::unique_ptr<elastic::FileSystem> file_system_;
};

TEST_P(FileSystemConformanceTest, AnExclusiveLockExcludesAllOthers) {
  using elastic::LockKind;
  Write("file", "text");
  const std::string path = Path("file");
  EXPECT_TRUE(absl::IsNotFound(file_system_->LockFile(Path("none"), LockKind::kShared).status()));
  EXPECT_FALSE(file_system_->LockFile(root_, LockKind::kShared).ok());
  auto one = file_system_->LockFile(path, LockKind::kShared);
  ASSERT_TRUE(one.ok()) << one.status();
  auto two = file_system_->LockFile(path, LockKind::kShared);
  EXPECT_TRUE(two.ok()) << two.status();
  EXPECT_TRUE(absl::IsUnavailable(file_system_->LockFile(path, LockKind::kExclusive).status()));
  one->reset();
  EXPECT_TRUE(absl::IsUnavailable(file_system_->LockFile(path, LockKind::kExclusive).status()));
  two->reset();
  auto alone = file_system_->LockFile(path, LockKind::kExclusive);
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_TRUE(absl::IsUnavailable(file_system_->LockFile(path, LockKind::kShared).status()));
  // The lock is on the file and not on its name.
  ASSERT_TRUE(file_system_->Rename(path, Path("other")).ok());
  EXPECT_TRUE(
      absl::IsUnavailable(file_system_->LockFile(Path("other"), LockKind::kShared).status()));
  alone->reset();
  EXPECT_TRUE(file_system_->LockFile(Path("other"), LockKind::kShared).ok());
}

TEST_P(FileSystemConformanceTest, ReadsWhatWasWritten) {
  Write("a", "hello");
  EXPECT_EQ(Read("a"), "hello");
  auto file = file_system_->OpenFile(Path("a"));
  ASSERT_TRUE(file.ok());
  char part[3] = {};
  EXPECT_TRUE((*file)->Read(1, part, 3).ok());
  EXPECT_EQ(std::string(part, 3), "ell");
}

TEST_P(FileSystemConformanceTest, ReadingPastTheEndIsDataLoss) {
  Write("a", "hello");
  auto file = file_system_->OpenFile(Path("a"));
  ASSERT_TRUE(file.ok());
  char part[3] = {};
  EXPECT_EQ((*file)->Read(3, part, 3).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ((*file)->Read(100, part, 1).code(), absl::StatusCode::kDataLoss);
}

TEST_P(FileSystemConformanceTest, CreateNeverTouchesWhatExists) {
  Write("a", "hello");
  EXPECT_EQ(file_system_->CreateFile(Path("a")).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Read("a"), "hello");
  ASSERT_TRUE(file_system_->MakeDirectory(Path("d")).ok());
  EXPECT_EQ(file_system_->MakeDirectory(Path("d")).code(), absl::StatusCode::kAlreadyExists);
}

TEST_P(FileSystemConformanceTest, WhatIsMissingIsNotFoundByName) {
  EXPECT_EQ(file_system_->OpenFile(Path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(file_system_->OpenFile(Path("none")).status().message()),
              HasSubstr(Path("none")));
  EXPECT_EQ(file_system_->CreateFile(Path("none/a")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(file_system_->MakeDirectory(Path("none/a")).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(file_system_->ListDirectory(Path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(file_system_->SyncDirectory(Path("none")).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(file_system_->RemoveFile(Path("none")).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(file_system_->Rename(Path("none"), Path("b")).code(), absl::StatusCode::kNotFound);
}

TEST_P(FileSystemConformanceTest, FoldersAreListedAndAreNoFiles) {
  ASSERT_TRUE(file_system_->MakeDirectory(Path("d")).ok());
  Write("d/a", "1");
  Write("d/line\nbreak", "2");
  auto names = file_system_->ListDirectory(Path("d"));
  ASSERT_TRUE(names.ok()) << names.status();
  EXPECT_THAT(*names, UnorderedElementsAre("a", "line\nbreak"));
  EXPECT_TRUE(file_system_->SyncDirectory(Path("d")).ok());
  EXPECT_EQ(file_system_->OpenFile(Path("d")).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(file_system_->ListDirectory(Path("d/a")).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(FileSystemConformanceTest, RenameMovesAFolderAndNeverReplaces) {
  ASSERT_TRUE(file_system_->MakeDirectory(Path("from")).ok());
  Write("from/a", "1");
  ASSERT_TRUE(file_system_->MakeDirectory(Path("taken")).ok());
  EXPECT_EQ(file_system_->Rename(Path("from"), Path("taken")).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Read("from/a"), "1");
  EXPECT_TRUE(file_system_->Rename(Path("from"), Path("to")).ok());
  EXPECT_EQ(Read("to/a"), "1");
  EXPECT_EQ(file_system_->ListDirectory(Path("from")).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(FileSystemConformanceTest, ReplaceFileReplaces) {
  Write("old", "1");
  Write("new", "2");
  EXPECT_TRUE(file_system_->ReplaceFile(Path("new"), Path("old")).ok());
  EXPECT_EQ(Read("old"), "2");
  EXPECT_EQ(file_system_->OpenFile(Path("new")).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(FileSystemConformanceTest, RemovesFilesAndOnlyEmptyFolders) {
  ASSERT_TRUE(file_system_->MakeDirectory(Path("d")).ok());
  Write("d/a", "1");
  EXPECT_EQ(file_system_->RemoveDirectory(Path("d")).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(file_system_->RemoveFile(Path("d")).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(file_system_->RemoveFile(Path("d/a")).ok());
  EXPECT_TRUE(file_system_->RemoveDirectory(Path("d")).ok());
  EXPECT_EQ(file_system_->ListDirectory(Path("d")).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(FileSystemConformanceTest, KindIsThatOfTheEntryItself) {
  Write("a", "1");
  ASSERT_TRUE(file_system_->MakeDirectory(Path("d")).ok());
  Link("to_file", "a");
  Link("to_folder", "d");
  Link("to_nothing", "none");
  EXPECT_EQ(*file_system_->KindOf(Path("a")), EntryKind::kFile);
  EXPECT_EQ(*file_system_->KindOf(Path("d")), EntryKind::kDirectory);
  for (const char* name : {"to_file", "to_folder", "to_nothing"}) {
    EXPECT_EQ(*file_system_->KindOf(Path(name)), EntryKind::kOther) << name;
  }
  EXPECT_EQ(file_system_->KindOf(Path("none")).status().code(), absl::StatusCode::kNotFound);
}

TEST_P(FileSystemConformanceTest, OnlyOpenFileGoesThroughALinkToAFolder) {
  ASSERT_TRUE(file_system_->MakeDirectory(Path("d")).ok());
  ASSERT_TRUE(file_system_->MakeDirectory(Path("d/inner")).ok());
  Write("d/a", "1");
  Link("link", "d");
  EXPECT_EQ(Read("link/a"), "1");
  const auto refused = absl::StatusCode::kFailedPrecondition;
  EXPECT_EQ(file_system_->CreateFile(Path("link/new")).status().code(), refused);
  EXPECT_EQ(file_system_->MakeDirectory(Path("link/new")).code(), refused);
  EXPECT_EQ(file_system_->KindOf(Path("link/a")).status().code(), refused);
  EXPECT_EQ(file_system_->ListDirectory(Path("link")).status().code(), refused);
  EXPECT_EQ(file_system_->SyncDirectory(Path("link")).code(), refused);
  EXPECT_EQ(file_system_->Rename(Path("link/a"), Path("b")).code(), refused);
  EXPECT_EQ(file_system_->Rename(Path("d/a"), Path("link/b")).code(), refused);
  EXPECT_EQ(file_system_->ReplaceFile(Path("link/a"), Path("b")).code(), refused);
  EXPECT_EQ(file_system_->RemoveFile(Path("link/a")).code(), refused);
  EXPECT_EQ(file_system_->RemoveDirectory(Path("link/inner")).code(), refused);
  EXPECT_EQ(file_system_->RemoveDirectory(Path("link")).code(), refused);
  EXPECT_THAT(*file_system_->ListDirectory(Path("d")), UnorderedElementsAre("a", "inner"));
}

TEST_P(FileSystemConformanceTest, LinkToAFileIsAnEntryOfItsOwn) {
  Write("a", "1");
  Link("link", "a");
  EXPECT_EQ(file_system_->CreateFile(Path("link")).status().code(),
            absl::StatusCode::kAlreadyExists);
  Write("new", "2");
  EXPECT_TRUE(file_system_->ReplaceFile(Path("new"), Path("link")).ok());
  EXPECT_EQ(Read("link"), "2");
  EXPECT_EQ(Read("a"), "1");
  Link("other", "a");
  EXPECT_TRUE(file_system_->RemoveFile(Path("other")).ok());
  EXPECT_EQ(Read("a"), "1");
  Link("dangling", "none");
  EXPECT_EQ(file_system_->CreateFile(Path("dangling")).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(file_system_->KindOf(Path("none")).status().code(), absl::StatusCode::kNotFound);
}

INSTANTIATE_TEST_SUITE_P(
    All, FileSystemConformanceTest,
    ::testing::Values(Implementation{"Posix",
                                     [](const std::string& root) {
                                       return std::make_unique<elastic::PosixFileSystem>(root);
                                     },
                                     [](elastic::FileSystem&, const std::string& path,
                                        const std::string& target) {
                                       ASSERT_EQ(symlink(target.c_str(), path.c_str()), 0);
                                     }},
                      Implementation{
                          "Memory",
                          [](const std::string&) { return std::make_unique<MemoryFileSystem>(); },
                          [](elastic::FileSystem& file_system, const std::string& path,
                             const std::string& target) {
                            static_cast<MemoryFileSystem&>(file_system).MakeLink(path, target);
                          }}),
    [](const auto& info) { return info.param.name; });

TEST(PosixFileSystemTest, RootMayBeALinkAndSoMayFoldersAboveIt) {
  const std::string top = FreshFolder("top");
  const std::string real = top + "/real";
  ASSERT_EQ(mkdir(real.c_str(), 0700), 0);
  ASSERT_EQ(mkdir((real + "/run").c_str(), 0700), 0);
  ASSERT_EQ(symlink(real.c_str(), (top + "/link").c_str()), 0);
  ASSERT_EQ(symlink("run", (real + "/alias").c_str()), 0);
  const std::string root = top + "/link/alias";
  elastic::PosixFileSystem file_system(root);
  EXPECT_TRUE(file_system.CreateFile(root + "/a").ok());
  EXPECT_TRUE(file_system.SyncDirectory(root).ok());
  EXPECT_THAT(*file_system.ListDirectory(root), UnorderedElementsAre("a"));
  EXPECT_EQ(access((real + "/run/a").c_str(), F_OK), 0);
}

TEST(PosixFileSystemTest, FifoIsNoFileAndDoesNotBlock) {
  std::string folder = absl::StrCat(::testing::TempDir(), "/fifoXXXXXX");
  const std::string path = absl::StrCat(mkdtemp(folder.data()), "/fifo");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  elastic::PosixFileSystem file_system;
  EXPECT_EQ(file_system.OpenFile(path).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(PosixFileSystemTest, FullDiskIsToldWhenSpaceIsReserved) {
  std::string folder = absl::StrCat(::testing::TempDir(), "/fullXXXXXX");
  const std::string path = absl::StrCat(mkdtemp(folder.data()), "/large");
  elastic::PosixFileSystem file_system;
  auto file = file_system.CreateFile(path);
  ASSERT_TRUE(file.ok());
  const absl::Status status = (*file)->Reserve(uint64_t{1} << 62);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
}

class MemoryFileSystemTest : public ::testing::Test {
 protected:
  using Loss = MemoryFileSystem::Loss;

  // Makes a synced file, a file with unsynced content, and a file with an unsynced name.
  void Prepare() {
    ASSERT_TRUE(file_system_.MakeDirectory("/d").ok());
    ASSERT_TRUE(file_system_.SyncDirectory("/").ok());
    Write("/d/safe", true);
    Write("/d/content_unsynced", false);
    ASSERT_TRUE(file_system_.SyncDirectory("/d").ok());
    Write("/d/name_unsynced", true);
  }

  void Write(const std::string& path, bool sync) {
    auto file = file_system_.CreateFile(path);
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE((*file)->Append("abc", 3).ok());
    if (!sync) return;
    ASSERT_TRUE((*file)->Sync().ok());
  }

  MemoryFileSystem file_system_;
};

TEST_F(MemoryFileSystemTest, PowerCutLosesWhatWasNotSynced) {
  Prepare();
  file_system_.PowerCut(Loss::kEverythingUnsynced);
  EXPECT_EQ(file_system_.Content("/d/safe"), "abc");
  EXPECT_EQ(file_system_.Content("/d/content_unsynced"), "");
  EXPECT_EQ(file_system_.Content("/d/name_unsynced"), std::nullopt);
}

TEST_F(MemoryFileSystemTest, PowerCutMayKeepNamesWithoutContent) {
  Prepare();
  file_system_.PowerCut(Loss::kUnsyncedContent);
  EXPECT_EQ(file_system_.Content("/d/content_unsynced"), std::string(3, '\0'));
  EXPECT_EQ(file_system_.Content("/d/name_unsynced"), "abc");
}

TEST_F(MemoryFileSystemTest, PowerCutMayKeepContentWithoutNames) {
  Prepare();
  file_system_.PowerCut(Loss::kUnsyncedNames);
  EXPECT_EQ(file_system_.Content("/d/content_unsynced"), "abc");
  EXPECT_EQ(file_system_.Content("/d/name_unsynced"), std::nullopt);
}

TEST_F(MemoryFileSystemTest, RenameIsUndoneUntilTheFolderIsSynced) {
  Prepare();
  ASSERT_TRUE(file_system_.Rename("/d", "/e").ok());
  file_system_.PowerCut(Loss::kEverythingUnsynced);
  EXPECT_EQ(file_system_.Content("/d/safe"), "abc");
  EXPECT_EQ(file_system_.Content("/e/safe"), std::nullopt);
}

TEST_F(MemoryFileSystemTest, FailsTheCallsItWasTold) {
  file_system_.FailCall(2, absl::ResourceExhaustedError("full"));
  EXPECT_TRUE(file_system_.MakeDirectory("/a").ok());
  EXPECT_EQ(file_system_.MakeDirectory("/b").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(file_system_.MakeDirectory("/c").ok());
  EXPECT_EQ(file_system_.calls(), 3);
  file_system_.FailFromCall(5, absl::InternalError("gone"));
  EXPECT_TRUE(file_system_.MakeDirectory("/d").ok());
  EXPECT_FALSE(file_system_.MakeDirectory("/e").ok());
  EXPECT_FALSE(file_system_.ListDirectory("/").ok());
}

// As on a file system in user space over an object store.
TEST(PosixFileSystemTest, WithoutHardLinksAFileIsRenamedAndReplacesNothing) {
  const std::string root = FreshFolder("fs");
  bool filtered = false;
  std::thread([&] {
    filtered = RefuseCalls({{SYS_renameat2, EINVAL}, {SYS_linkat, EPERM}});
    if (!filtered) return;
    elastic::PosixFileSystem file_system(root);
    const auto path = [&root](const char* name) { return absl::StrCat(root, "/", name); };
    for (const char* name : {"a", "b"}) {
      auto file = file_system.CreateFile(path(name));
      ASSERT_TRUE(file.ok()) << file.status();
      ASSERT_TRUE((*file)->Append(name, 1).ok());
    }
    ASSERT_TRUE(file_system.MakeDirectory(path("folder")).ok());
    EXPECT_EQ(file_system.Rename(path("a"), path("c")), absl::OkStatus());
    EXPECT_TRUE(absl::IsAlreadyExists(file_system.Rename(path("b"), path("c"))));
    EXPECT_EQ(file_system.Rename(path("folder"), path("moved")), absl::OkStatus());
    EXPECT_THAT(*file_system.ListDirectory(root), UnorderedElementsAre("b", "c", "moved"));
    char content = '?';
    ASSERT_TRUE((*file_system.OpenFile(path("c")))->Read(0, &content, 1).ok());
    EXPECT_EQ(content, 'a');
    EXPECT_THAT(file_system.Rename(path("b"), path("none/c")).message(), HasSubstr("No such file"));
    EXPECT_THAT(file_system.ReplaceFile(path("b"), path("moved")).message(),
                HasSubstr("moved: rename: Is a directory"));
  }).join();
  if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
}

}  // namespace
}  // namespace ddp::testing
