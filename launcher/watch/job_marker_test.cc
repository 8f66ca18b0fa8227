#include "launcher/watch/job_marker.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "testing/temporary_folder.h"

namespace ddp::launcher {
namespace {

class JobMarkerTest : public ::testing::Test {
 protected:
  std::string Folder(const std::string& name, mode_t mode = 0700) {
    const std::string folder = absl::StrCat(parent_, "/", name);
    EXPECT_EQ(::mkdir(folder.c_str(), mode), 0);
    EXPECT_EQ(::chmod(folder.c_str(), mode), 0);
    return folder;
  }

  static JobMarker Marker(const std::string& run_id) {
    return {.run_id = run_id,
            .instance = 3,
            .endpoint = "unix:///tmp/ddprun_x/redis.sock",
            .with_credentials = true,
            .agent_pid = ::getpid()};
  }

  const testing::TemporaryFolder temporary_;
  const std::string parent_ = temporary_.path();
};

TEST_F(JobMarkerTest, IsFoundAgain) {
  ASSERT_TRUE(WriteJobMarker(Folder("ddprun_b"), Marker("beta")).ok());
  const std::string folder = Folder("ddprun_a");
  ASSERT_TRUE(WriteJobMarker(folder, Marker("none")).ok());
  ASSERT_TRUE(WriteJobMarker(folder, Marker("alpha")).ok());  // once more
  ASSERT_TRUE(WriteJobMarker(Folder("other"), Marker("other")).ok());
  Folder("ddprun_empty");

  const std::vector<JobMarker> markers = FindJobMarkers({"/nonexistent", parent_});
  ASSERT_EQ(markers.size(), 2u);
  EXPECT_EQ(markers[0].run_id, "alpha");
  EXPECT_EQ(markers[0].instance, 3);
  EXPECT_EQ(markers[0].endpoint, "unix:///tmp/ddprun_x/redis.sock");
  EXPECT_TRUE(markers[0].with_credentials);
  EXPECT_EQ(markers[0].agent_pid, ::getpid());
  EXPECT_EQ(markers[1].run_id, "beta");
}

TEST_F(JobMarkerTest, APasswordThatDdprunHasMadeIsFoundAgain) {
  JobMarker marker = Marker("static");
  marker.password = "a\"b";
  ASSERT_TRUE(WriteJobMarker(Folder("ddprun_static"), marker).ok());
  ASSERT_TRUE(WriteJobMarker(Folder("ddprun_users"), Marker("users")).ok());
  const std::vector<JobMarker> markers = FindJobMarkers({parent_});
  ASSERT_EQ(markers.size(), 2u);
  EXPECT_EQ(markers[0].password, "a\"b");
  EXPECT_EQ(markers[1].password, "");
}

TEST_F(JobMarkerTest, WhatOthersCanWriteIsNotBelieved) {
  ASSERT_TRUE(WriteJobMarker(Folder("ddprun_open", 0777), Marker("a")).ok());
  const std::string folder = Folder("ddprun_file");
  ASSERT_TRUE(WriteJobMarker(folder, Marker("a")).ok());
  ASSERT_EQ(::chmod((folder + "/job.json").c_str(), 0666), 0);
  std::filesystem::create_directory_symlink(folder, parent_ + "/ddprun_link");
  const std::string linked = Folder("ddprun_linked_file");
  std::filesystem::create_symlink(folder + "/job.json", linked + "/job.json");
  EXPECT_TRUE(FindJobMarkers({parent_}).empty());
}

TEST_F(JobMarkerTest, WhatIsNoMarkerIsPassedOver) {
  int number = 0;
  for (const char* text :
       {"", "{", "[]", "7", "{}",
        R"({"run_id":7,"instance":1,"endpoint":"e","with_credentials":true,"agent_pid":1})",
        R"({"run_id":"r","instance":"1","endpoint":"e","with_credentials":true,"agent_pid":1})",
        R"({"run_id":"r","instance":1,"endpoint":"e","with_credentials":true,"agent_pid":-1})",
        R"({"run_id":"r","instance":1,"endpoint":"e","with_credentials":true,"agent_pid":1e99})",
        R"({"run_id":"r","instance":1,"endpoint":"e","with_credentials":true,"agent_pid":1,
            "password":7})"}) {
    const std::string file = Folder(absl::StrCat("ddprun_", number++)) + "/job.json";
    std::ofstream(file) << text;
    ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
  }
  const std::string file = Folder("ddprun_long") + "/job.json";
  std::ofstream(file) << std::string(1 << 20, '[');
  ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
  EXPECT_TRUE(FindJobMarkers({parent_}).empty());
}

TEST_F(JobMarkerTest, AnAgentThatHasEndedIsPassedOver) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  JobMarker marker = Marker("gone");
  marker.agent_pid = child;
  ASSERT_TRUE(WriteJobMarker(Folder("ddprun_gone"), marker).ok());
  EXPECT_TRUE(FindJobMarkers({parent_}).empty());
}

TEST_F(JobMarkerTest, NamesTheFileThatCannotBeWritten) {
  const absl::Status status = WriteJobMarker(parent_ + "/none", Marker("a"));
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(std::string(status.message()).find("/none/job.json: No such file"), std::string::npos);
}

}  // namespace
}  // namespace ddp::launcher
