#include "store/redis/redis_errors.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::store {
namespace {

// The wording of Redis 6.
std::string WithinScript(const std::string& refusal) {
  return "ERR Error running script (call to f_0123456789abcdef0123456789abcdef01234567): "
         "@user_script:7: @user_script: 7: -" +
         refusal;
}

const char* const kPassing[] = {
    "READONLY You can't write against a read only replica.",
    "MISCONF Redis is configured to save RDB snapshots, but is unable to persist on disk.",
    "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "NOREPLICAS Not enough good replicas to write.",
};

TEST(RedisErrorsTest, WhatPassesIsUnavailableWithinAScriptToo) {
  for (const std::string refusal : kPassing) {
    for (const std::string& text : {refusal, WithinScript(refusal),
                                    // The wording of Redis 7.
                                    refusal + " script: 0123, on @user_script:7."}) {
      EXPECT_TRUE(IsTransientRefusal(text)) << text;
      const absl::Status status = StatusOfErrorReply(text, RedisEndpoint());
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    }
  }
}

TEST(RedisErrorsTest, AReplicaIsToldFromWhatElseRefuses) {
  const std::string readonly = "READONLY You can't write against a read only replica.";
  EXPECT_TRUE(IsReplicaRefusal(readonly));
  EXPECT_TRUE(IsReplicaRefusal(WithinScript(readonly)));
  EXPECT_TRUE(IsReplicaRefusal("MASTERDOWN Link with MASTER is down"));
  EXPECT_FALSE(IsReplicaRefusal("LOADING Redis is loading the dataset in memory"));
  EXPECT_FALSE(IsReplicaRefusal("ERR user_script:7: READONLY is no number"));
}

TEST(RedisErrorsTest, WhatAScriptDoesWrongIsFinal) {
  for (const std::string text :
       {"ERR Error running script (call to f_01): @user_script:7: attempt to index a nil value",
        "ERR user_script:7: READONLY is no number script: 0123, on @user_script:7.",
        "WRONGTYPE Operation against a key holding the wrong kind of value"}) {
    EXPECT_FALSE(IsTransientRefusal(text)) << text;
    EXPECT_TRUE(absl::IsFailedPrecondition(StatusOfErrorReply(text, RedisEndpoint()))) << text;
  }
  EXPECT_FALSE(IsTransientRefusal(WithinScript("WRONGTYPE Operation against a key")));
}

TEST(RedisErrorsTest, AScriptThatIsNeitherKnownNorTakenIsToldWithTheCure) {
  for (const std::string text :
       {"NOPERM User default has no permissions to run the 'eval' command",
        "NOPERM this user has no permissions to run the 'eval' command or its subcommand"}) {
    const absl::Status status = StatusOfErrorReply(text, RedisEndpoint());
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    for (const char* part : {"of all nodes from one version", "allow EVAL"}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status;
    }
  }
  const absl::Status other = StatusOfErrorReply(
      "NOPERM User default has no permissions to run the 'get' command", RedisEndpoint());
  EXPECT_TRUE(absl::IsPermissionDenied(other)) << other;
  EXPECT_EQ(other.message().find("EVAL"), std::string::npos) << other;
  EXPECT_TRUE(absl::IsNotFound(
      StatusOfErrorReply("NOSCRIPT No matching script. Please use EVAL.", RedisEndpoint())));
}

TEST(RedisErrorsTest, AFullMemoryIsToldAsSuch) {
  const std::string oom = "OOM command not allowed when used memory > 'maxmemory'.";
  EXPECT_TRUE(absl::IsResourceExhausted(StatusOfErrorReply(oom, RedisEndpoint())));
  EXPECT_TRUE(absl::IsResourceExhausted(StatusOfErrorReply(WithinScript(oom), RedisEndpoint())));
}

}  // namespace
}  // namespace ddp::store
