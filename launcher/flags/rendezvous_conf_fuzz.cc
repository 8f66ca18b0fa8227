// Fuzz target for --rdzv-conf: an accepted text can be written down and parsed again, and an error
// is one line.
#include "launcher/flags/rendezvous_conf.h"

#include <glog/logging.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "launcher/flags/flag_reader.h"
#include "testing/fuzz_target.h"

namespace ddp::launcher {
namespace {

using TimeMember = std::optional<absl::Duration> RendezvousConf::*;

constexpr std::pair<const char*, TimeMember> kTimes[] = {
    {"join_timeout", &RendezvousConf::join_timeout},
    {"last_call_timeout", &RendezvousConf::last_call_timeout},
    {"close_timeout", &RendezvousConf::close_timeout},
    {"read_timeout", &RendezvousConf::read_timeout},
    {"keep_alive_interval", &RendezvousConf::keep_alive_interval},
    {"heartbeat_timeout", &RendezvousConf::heartbeat_timeout},
};

// Returns a text that parses to `conf`.
std::string Format(const RendezvousConf& conf) {
  std::vector<std::string> pairs;
  for (const auto& [key, member] : kTimes) {
    if (!(conf.*member).has_value()) continue;
    pairs.push_back(absl::StrFormat("%s=%.17g", key, absl::ToDoubleSeconds(*(conf.*member))));
  }
  if (conf.cas_backoff_max.has_value()) {
    pairs.push_back(absl::StrFormat("cas_backoff_max_seconds=%.17g",
                                    absl::ToDoubleSeconds(*conf.cas_backoff_max)));
  }
  if (conf.keep_alive_max_attempt.has_value()) {
    pairs.push_back(absl::StrCat("keep_alive_max_attempt=", *conf.keep_alive_max_attempt));
  }
  if (conf.rank.has_value()) pairs.push_back(absl::StrCat("rank=", *conf.rank));
  if (conf.is_host.has_value()) pairs.push_back(absl::StrCat("is_host=", *conf.is_host));
  if (conf.any_program.has_value()) {
    pairs.push_back(absl::StrCat("any_program=", *conf.any_program));
  }
  for (const auto& [key, path] : conf.tls_files) pairs.push_back(absl::StrCat(key, "=", path));
  for (const std::string& key : conf.without_meaning) pairs.push_back(key + "=x");
  return absl::StrJoin(pairs, ",");
}

void CheckConf(const RendezvousConf& conf) {
  for (const auto& [key, member] : kTimes) {
    const absl::Duration time = (conf.*member).value_or(absl::Seconds(1));
    CHECK(time > absl::ZeroDuration() && time <= absl::Seconds(kMaxFlagSeconds)) << key;
  }
  CHECK_GE(conf.cas_backoff_max.value_or(absl::ZeroDuration()), absl::ZeroDuration());
  CHECK_GE(conf.keep_alive_max_attempt.value_or(1), 1);
  CHECK_GE(conf.rank.value_or(0), 0);
  const std::string text = Format(conf);
  const absl::StatusOr<RendezvousConf> again = ParseRendezvousConf(text);
  CHECK(again.ok()) << text << ": " << again.status();
  CHECK_EQ(Format(*again), text);
}

}  // namespace
}  // namespace ddp::launcher

namespace ddp::testing {

void FuzzOne(absl::string_view input) {
  const auto conf = launcher::ParseRendezvousConf(std::string(input));
  if (conf.ok()) return launcher::CheckConf(*conf);
  CHECK(absl::IsInvalidArgument(conf.status())) << conf.status();
  CHECK(IsOneLine(conf.status().message())) << conf.status();
}

std::vector<std::string> FuzzSeeds() {
  return {"",
          "join_timeout=600,last_call_timeout=30.5,close_timeout=1e-3,read_timeout=60",
          "timeout=5, keep_alive_interval=0.25 ,heartbeat_timeout=604800",
          "cas_backoff_max_seconds=0",
          "keep_alive_max_attempt=10000,rank=1000000,is_host=False,store_type=tcp",
          "is_host=y,is_host=0,rank=-1"};
}

}  // namespace ddp::testing
