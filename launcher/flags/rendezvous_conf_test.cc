#include "launcher/flags/rendezvous_conf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

RendezvousConf Parsed(const std::string& text) {
  const absl::StatusOr<RendezvousConf> conf = ParseRendezvousConf(text);
  EXPECT_TRUE(conf.ok()) << conf.status();
  return conf.ok() ? *conf : RendezvousConf();
}

std::string Error(const std::string& text) {
  const absl::StatusOr<RendezvousConf> conf = ParseRendezvousConf(text);
  return conf.ok() ? "no error" : std::string(conf.status().message());
}

TEST(RendezvousConfTest, EveryKeyOfTorchrun) {
  const RendezvousConf conf = Parsed(
      "join_timeout=60,last_call_timeout=1.5,close_timeout=3,read_timeout=4,"
      "keep_alive_interval=0.5,keep_alive_max_attempt=7,heartbeat_timeout=2,"
      "cas_backoff_max_seconds=0.25,is_host=1,any_program=1,store_type=file,rank=3");
  EXPECT_EQ(conf.join_timeout, absl::Seconds(60));
  EXPECT_EQ(conf.last_call_timeout, absl::Seconds(1.5));
  EXPECT_EQ(conf.close_timeout, absl::Seconds(3));
  EXPECT_EQ(conf.read_timeout, absl::Seconds(4));
  EXPECT_EQ(conf.keep_alive_interval, absl::Milliseconds(500));
  EXPECT_EQ(conf.keep_alive_max_attempt, 7);
  EXPECT_EQ(conf.heartbeat_timeout, absl::Seconds(2));
  EXPECT_EQ(conf.cas_backoff_max, absl::Milliseconds(250));
  EXPECT_EQ(conf.is_host, true);
  EXPECT_EQ(conf.any_program, true);
  EXPECT_EQ(conf.rank, 3);
  EXPECT_THAT(conf.without_meaning, ElementsAre("store_type"));
}

TEST(RendezvousConfTest, NothingIsSaidWithoutPairs) {
  for (const char* text : {"", "  "}) {
    const RendezvousConf conf = Parsed(text);
    EXPECT_FALSE(conf.join_timeout.has_value());
    EXPECT_FALSE(conf.is_host.has_value());
    EXPECT_THAT(conf.without_meaning, IsEmpty());
  }
}

TEST(RendezvousConfTest, TimeoutIsTheJoinTimeoutUnlessThatIsGivenToo) {
  EXPECT_EQ(Parsed("timeout=9").join_timeout, absl::Seconds(9));
  EXPECT_EQ(Parsed("join_timeout=8,timeout=9").join_timeout, absl::Seconds(8));
  EXPECT_EQ(Parsed("timeout=9, join_timeout = 8").join_timeout, absl::Seconds(8));
}

TEST(RendezvousConfTest, WaysToSayYesAndNo) {
  for (const char* yes : {"1", "true", "True", "t", "yes", "y"}) {
    EXPECT_EQ(Parsed(std::string("is_host=") + yes).is_host, true) << yes;
  }
  for (const char* no : {"0", "false", "F", "no", "n"}) {
    EXPECT_EQ(Parsed(std::string("is_host=") + no).is_host, false) << no;
  }
}

TEST(RendezvousConfTest, NoBackoffIsTorchrunsDefault) {
  EXPECT_EQ(Parsed("cas_backoff_max_seconds=0.0").cas_backoff_max, absl::ZeroDuration());
  for (const char* bad : {"-1", "x", "nan", "inf"}) {
    EXPECT_THAT(Error(std::string("cas_backoff_max_seconds=") + bad),
                HasSubstr(std::string(bad) + ": expected seconds from 0 to"));
  }
}

TEST(RendezvousConfTest, MistakesNameTheKeyAndWhatIsAllowed) {
  EXPECT_THAT(Error("join_timeout=0"),
              AllOf(HasSubstr("join_timeout=0"), HasSubstr("seconds above 0")));
  for (const char* bad : {"-1", "x", "nan", "inf", "1e9", "5s"}) {
    EXPECT_THAT(Error(std::string("close_timeout=") + bad),
                HasSubstr(std::string("close_timeout=") + bad))
        << bad;
  }
  EXPECT_THAT(Error("keep_alive_max_attempt=0"), HasSubstr("from 1 to"));
  EXPECT_THAT(Error("rank=-1"), HasSubstr("rank=-1: expected a whole number"));
  EXPECT_THAT(Error("is_host=maybe"), HasSubstr("true or false"));
  EXPECT_THAT(Error("protocol=tls"), AllOf(HasSubstr("unknown key protocol"),
                                           HasSubstr("join_timeout"), HasSubstr("store_type")));
  for (const char* bad : {"join_timeout", "=1", "join_timeout=", "join_timeout=1,,rank=1", ","}) {
    EXPECT_THAT(Error(bad), HasSubstr("KEY=VALUE")) << bad;
  }
}

TEST(RendezvousConfTest, AMistakeIsOneLineWhateverIsInIt) {
  EXPECT_THAT(Error("a\nb=1"), HasSubstr("unknown key a?b"));
  EXPECT_THAT(Error("rank=a\033[2Jb"), HasSubstr("rank=a?[2Jb: expected"));
  EXPECT_THAT(Error("a\nb"), HasSubstr("'a?b': expected KEY=VALUE"));
}

}  // namespace
}  // namespace ddp::launcher
