// Tests RendezvousCheck against keys that the test writes as the rendezvous scripts write them.
#include "elastic/checkpoint/folder/rendezvous_check.h"

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

class RendezvousCheckTest : public ::testing::Test {
 protected:
  RendezvousCheckTest() : redis_(testing::RedisFixture::Start()), connection_(redis_->Connect()) {}

  void WriteJob(int generation, const std::string& nonce, const std::string& state = "running") {
    const auto reply =
        connection_->Command({"HSET", "ddp:{digits}:i3:job", "token", "t0ken", "generation",
                              absl::StrCat(generation), "nonce", nonce, "state", state});
    ASSERT_TRUE(reply.ok()) << reply.status();
  }

  // Asks as generation 7 of instance 3.
  absl::StatusOr<std::string> Ask() {
    const auto check =
        RendezvousCheck::Of(store::FormatStoreAddress({.endpoint = redis_->endpoint(),
                                                       .prefix = "ddp:{digits}:i3:g7.abc:store:"}),
                            absl::Seconds(10));
    if (!check.ok()) return check.status();
    EXPECT_EQ((*check)->instance(), 3);
    return (*check)->Ask();
  }

  const std::unique_ptr<testing::RedisFixture> redis_;
  const std::unique_ptr<store::RedisConnection> connection_;
};

TEST_F(RendezvousCheckTest, TheNewestGenerationGetsTheTokenOfItsJob) {
  WriteJob(7, "abc");
  const auto answer = Ask();
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(*answer, "t0ken");
}

TEST_F(RendezvousCheckTest, AnOlderGenerationIsRefusedByNumber) {
  WriteJob(8, "abd");
  const auto answer = Ask();
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(answer.status().message()), HasSubstr("at generation 8 (abd) already"));
  WriteJob(7, "abd");  // another generation of the same number
  EXPECT_EQ(Ask().status().code(), absl::StatusCode::kFailedPrecondition);
  WriteJob(7, "abc", "ended");
  EXPECT_EQ(Ask().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(RendezvousCheckTest, AServerThatForgotTheGenerationGivesNoAnswer) {
  EXPECT_EQ(Ask().status().code(), absl::StatusCode::kNotFound);
  WriteJob(6, "abb");
  EXPECT_EQ(Ask().status().code(), absl::StatusCode::kNotFound);
}

TEST_F(RendezvousCheckTest, AServerThatIsGoneGivesNoAnswer) {
  WriteJob(7, "abc");
  redis_->Kill();
  const auto check =
      RendezvousCheck::Of(store::FormatStoreAddress({.endpoint = redis_->endpoint(),
                                                     .prefix = "ddp:{digits}:i3:g7.abc:store:"}),
                          absl::Milliseconds(200));
  ASSERT_TRUE(check.ok()) << check.status();
  EXPECT_EQ((*check)->Ask().status().code(), absl::StatusCode::kUnavailable);
}

TEST(RendezvousCheckAddressTest, OtherStoresHaveNoRendezvous) {
  for (const char* prefix : {"x", "ddp:{a}:i1:store:", "ddp:{a}:g1.n:store:", "ddp:{a}:i1:g1.n:",
                             "ddp:{a}:ix:g1.n:store:", "ddp:{a}:i1:g.n:store:", ":g", ":store:"}) {
    const std::string url =
        store::FormatStoreAddress({.endpoint = {.host = "127.0.0.1"}, .prefix = prefix});
    EXPECT_EQ(RendezvousCheck::Of(url, absl::Seconds(1)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << prefix;
  }
  EXPECT_FALSE(RendezvousCheck::Of("nonsense", absl::Seconds(1)).ok());
}

}  // namespace
}  // namespace ddp::elastic
