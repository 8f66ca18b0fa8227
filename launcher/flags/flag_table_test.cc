#include "launcher/flags/flag_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "elastic/health/hang_detector.h"
#include "elastic/job/job_spec.h"
#include "launcher/flags/command_line.h"
#include "launcher/flags/flag_default.h"
#include "launcher/flags/rendezvous_choice.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;

// A default is part of what users rely on: a change here is a change for them.
TEST(FlagTableTest, TheDefaultsOfAllFlags) {
  std::map<std::string, std::string> defaults;
  for (const FlagSpec& flag : kFlagTable) {
    const std::string text = TextOf(flag.default_value);
    if (!text.empty()) defaults[flag.name] = text;
  }
  const std::map<std::string, std::string> expected = {
      {"nnodes", "1:1"},
      {"nproc-per-node", "1"},
      {"role", "default"},
      {"start-method", "spawn"},
      {"lease-ms", "3000"},
      {"store-outage-timeout", "600"},
      {"max-node-losses", "1000"},
      {"node-unit", "1"},
      {"scale-up-delay", "30"},
      {"max-restarts", "0"},
      {"no-progress-limit", "3"},
      {"quarantine-strikes", "3"},
      {"hang-timeout", "30"},
      {"fault-grace-ms", "200"},
      {"shutdown-timeout", "30"},
      {"kill-timeout", "10"},
      {"stuck-timeout", "120"},
      {"uninterruptible-timeout", "0"},
      {"exit-barrier-timeout", "300"},
      {"signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
      {"exit-code", "default"},
      {"straggler-factor", "1.5"},
      {"event-log-handler", "null"},
      {"redirects", "0"},
      {"tee", "0"},
      {"log-line-prefix-template", "[${role_name}${local_rank}]:"},
      {"logs-specs", "default"},
  };
  EXPECT_EQ(defaults, expected);
}

TEST(FlagTableTest, TheHelpShowsEachDefault) {
  const std::string help = absl::StrReplaceAll(HelpText(), {{"\n      ", " "}});
  for (const FlagSpec& flag : kFlagTable) {
    const std::string text = TextOf(flag.default_value);
    if (text.empty()) continue;
    EXPECT_THAT(help, HasSubstr(absl::StrCat("Default: ", text, ".")));
  }
}

// The texts of the table state some numbers that no flag has for itself.
TEST(FlagTableTest, NumbersInTheTextsAreThoseOfTheJob) {
  const elastic::JobSpec job;
  const auto seconds = [](absl::Duration time) { return TextOf(InSeconds{time}); };
  const std::string conf = FlagOf("rdzv-conf").help;
  EXPECT_THAT(
      conf, HasSubstr(absl::StrCat("join_timeout (", seconds(job.times.rendezvous_timeout), ")")));
  EXPECT_THAT(conf,
              HasSubstr(absl::StrCat("last_call_timeout (", seconds(job.rules.last_call), ")")));
  EXPECT_THAT(conf,
              HasSubstr(absl::StrCat("close_timeout (", seconds(job.times.farewell_timeout), ")")));
  EXPECT_THAT(FlagOf("quarantine-strikes").help,
              HasSubstr(absl::StrCat("for ", seconds(job.rules.quarantine_cooldown), " s")));
  EXPECT_THAT(FlagOf("hang-timeout").help,
              HasSubstr(absl::StrCat("for ", job.hangs.factor, " times its longest step")));
  EXPECT_THAT(FlagOf("heartbeat-ms").help, HasSubstr("a sixth of the lease"));
  EXPECT_EQ(elastic::RendezvousRules::kHeartbeatsPerLease, 6);
  EXPECT_THAT(FlagOf("master-port").help, HasSubstr(absl::StrCat("Default: ", kStaticPort, ";")));
  EXPECT_THAT(FlagOf("rdzv-backend").help, HasSubstr(absl::StrCat("port ", kC10dPort, " where")));
  EXPECT_THAT(FlagOf("rdzv-endpoint").help,
              HasSubstr(absl::StrCat("(", store::RedisEndpoint::kDefaultPort, ")")));
}

}  // namespace
}  // namespace ddp::launcher
