#include "launcher/watch/status_command.h"

#include <map>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;

class ParseStatusArgumentsTest : public ::testing::Test {
 protected:
  absl::StatusOr<StatusRequest> Parse(const std::vector<std::string>& arguments) {
    return ParseStatusArguments(arguments,
                                [this](const std::string& name) -> std::optional<std::string> {
                                  const auto found = environment_.find(name);
                                  if (found == environment_.end()) return std::nullopt;
                                  return found->second;
                                });
  }
  std::string Error(const std::vector<std::string>& arguments) {
    const absl::Status status = Parse(arguments).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }

  std::map<std::string, std::string> environment_;
};

TEST_F(ParseStatusArgumentsTest, AsksForTheJobsOfThisHostByDefault) {
  const absl::StatusOr<StatusRequest> request = Parse({});
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_FALSE(request->endpoint.has_value());
  EXPECT_FALSE(request->run_id.has_value());
  EXPECT_EQ(request->instance, 0);
  EXPECT_FALSE(request->json || request->all || request->help);
}

TEST_F(ParseStatusArgumentsTest, TakesFlagsAsDdprunDoes) {
  const absl::StatusOr<StatusRequest> request = Parse(
      {"--rdzv_endpoint", "host:1", "--rdzv-id=a=b", "--instance=3", "--json", "--all", "-h"});
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->endpoint, "host:1");
  EXPECT_EQ(request->run_id, "a=b");
  EXPECT_EQ(request->instance, 3);
  EXPECT_TRUE(request->json && request->all && request->help);
}

TEST_F(ParseStatusArgumentsTest, TheEnvironmentCountsWhereNoFlagIsGiven) {
  environment_ = {{"PET_RDZV_ENDPOINT", "host:1"}, {"PET_RDZV_ID", ""}};
  EXPECT_EQ(Parse({})->endpoint, "host:1");
  EXPECT_FALSE(Parse({})->run_id.has_value());
  EXPECT_EQ(Parse({"--rdzv-endpoint=other"})->endpoint, "other");
}

TEST_F(ParseStatusArgumentsTest, TheBackendGivesTheEndpointItsPort) {
  EXPECT_EQ(Parse({"--rdzv-endpoint=host"})->default_port, 6379);
  EXPECT_EQ(Parse({"--rdzv-endpoint=host", "--rdzv-backend=redis"})->default_port, 6379);
  EXPECT_EQ(Parse({"--rdzv_backend", "c10d", "--rdzv-endpoint=host"})->default_port, 29400);
  environment_ = {{"PET_RDZV_BACKEND", "c10d"}};
  EXPECT_EQ(Parse({"--rdzv-endpoint=host"})->default_port, 29400);
  EXPECT_EQ(Parse({"--rdzv-endpoint=host", "--rdzv-backend=redis"})->default_port, 6379);
  environment_ = {{"PET_RDZV_BACKEND", ""}};
  EXPECT_EQ(Parse({"--rdzv-endpoint=host"})->default_port, 6379);
}

// The endpoint of a static rendezvous is the master's address.
TEST_F(ParseStatusArgumentsTest, AStaticJobIsFoundOnItsHosts) {
  environment_ = {{"PET_RDZV_BACKEND", "static"}, {"PET_RDZV_ENDPOINT", "host:1"}};
  const absl::StatusOr<StatusRequest> request = Parse({});
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_FALSE(request->endpoint.has_value());
  EXPECT_THAT(Error({"--rdzv-endpoint=host:1"}),
              HasSubstr("--rdzv-endpoint: no Redis server is there with PET_RDZV_BACKEND=static"));
}

TEST_F(ParseStatusArgumentsTest, NamesTheMistake) {
  EXPECT_THAT(Error({"--nope"}), HasSubstr("unknown flag --nope"));
  EXPECT_THAT(Error({"--json=1"}), HasSubstr("unknown flag --json=1"));
  EXPECT_THAT(Error({"digits"}), HasSubstr("unexpected digits"));
  EXPECT_THAT(Error({"-"}), HasSubstr("unexpected -"));
  EXPECT_THAT(Error({"--"}), HasSubstr("unknown flag --"));
  EXPECT_THAT(Error({"--rdzv-id"}), HasSubstr("--rdzv-id: a value is missing"));
  EXPECT_THAT(Error({"--rdzv-id="}), HasSubstr("--rdzv-id: a value is missing"));
  EXPECT_THAT(Error({"--instance=0"}), HasSubstr("--instance: 0 is not a number from 1"));
  EXPECT_THAT(Error({"--instance=x"}), HasSubstr("--instance: x"));
  EXPECT_THAT(Error({"--rdzv-backend=etcd"}),
              HasSubstr("--rdzv-backend=etcd: expected redis, c10d or static"));
  // The error is one line, whatever the user wrote.
  EXPECT_THAT(Error({"--a\nb"}), HasSubstr("unknown flag --a?b"));
  EXPECT_THAT(Error({"a\033[2J"}), HasSubstr("unexpected a?[2J"));
  EXPECT_THAT(Error({"--instance=\n"}), HasSubstr("--instance: ? is not"));
  environment_ = {{"PET_RDZV_BACKEND", "a\nb"}};
  EXPECT_THAT(Error({}), HasSubstr("PET_RDZV_BACKEND=a?b: expected"));
}

}  // namespace
}  // namespace ddp::launcher
