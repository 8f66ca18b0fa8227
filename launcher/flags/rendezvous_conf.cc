#include "launcher/flags/rendezvous_conf.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "launcher/flags/flag_reader.h"

namespace ddp::launcher {
namespace {

struct TimeKey {
  const char* name;
  std::optional<absl::Duration> RendezvousConf::*member;
  bool may_be_zero = false;
};

constexpr std::array<TimeKey, 8> kTimeKeys = {{
    {"join_timeout", &RendezvousConf::join_timeout},
    {"timeout", nullptr},  // stands for join_timeout, unless that is given
    {"last_call_timeout", &RendezvousConf::last_call_timeout},
    {"close_timeout", &RendezvousConf::close_timeout},
    {"read_timeout", &RendezvousConf::read_timeout},
    {"keep_alive_interval", &RendezvousConf::keep_alive_interval},
    {"heartbeat_timeout", &RendezvousConf::heartbeat_timeout},
    {"cas_backoff_max_seconds", &RendezvousConf::cas_backoff_max, /*may_be_zero=*/true},
}};

constexpr const char* kTlsFiles[] = {"tls_ca_cert_file", "tls_cert_file", "tls_key_file"};

constexpr int64_t kMaxAttempts = 10'000;
constexpr int64_t kMaxRank = 1'000'000;

absl::Status Bad(const std::string& key, const std::string& value, const std::string& expected) {
  return absl::InvalidArgumentError(absl::StrCat(key, "=", Shown(value), ": expected ", expected));
}

absl::StatusOr<int> ReadInteger(const std::string& key, const std::string& value, int64_t min,
                                int64_t max) {
  int64_t number = 0;
  if (!ParseInteger(value, &number) || number < min || number > max) {
    return Bad(key, value, absl::StrCat("a whole number from ", min, " to ", max));
  }
  return static_cast<int>(number);
}

absl::StatusOr<bool> ReadBool(const std::string& key, const std::string& value) {
  const std::string lower = absl::AsciiStrToLower(value);
  if (lower == "1" || lower == "true" || lower == "t" || lower == "yes" || lower == "y") {
    return true;
  }
  if (lower == "0" || lower == "false" || lower == "f" || lower == "no" || lower == "n") {
    return false;
  }
  return Bad(key, value, "true or false");
}

std::string KnownKeys() {
  std::vector<std::string> names = {"keep_alive_max_attempt", "is_host", "any_program", "rank",
                                    "store_type"};
  names.insert(names.end(), std::begin(kTlsFiles), std::end(kTlsFiles));
  for (const TimeKey& key : kTimeKeys) names.emplace_back(key.name);
  std::sort(names.begin(), names.end());
  return absl::StrJoin(names, ", ");
}

// Reads one pair. `timeout` receives the value of the key `timeout`.
absl::Status ReadPair(const std::string& key, const std::string& value, RendezvousConf& conf,
                      std::optional<absl::Duration>& timeout) {
  for (const TimeKey& time_key : kTimeKeys) {
    if (key != time_key.name) continue;
    absl::Duration duration;
    const bool is_time = ParseSeconds(value, &duration) && duration >= absl::ZeroDuration();
    if (!is_time || (duration == absl::ZeroDuration() && !time_key.may_be_zero)) {
      return Bad(
          key, value,
          absl::StrCat(time_key.may_be_zero ? "seconds from 0 to " : "seconds above 0, up to ",
                       kMaxFlagSeconds));
    }
    (time_key.member == nullptr ? timeout : conf.*time_key.member) = duration;
    return absl::OkStatus();
  }
  if (key == "keep_alive_max_attempt") {
    DDP_ASSIGN_OR_RETURN(conf.keep_alive_max_attempt, ReadInteger(key, value, 1, kMaxAttempts));
  } else if (key == "rank") {
    DDP_ASSIGN_OR_RETURN(conf.rank, ReadInteger(key, value, 0, kMaxRank));
  } else if (key == "is_host") {
    DDP_ASSIGN_OR_RETURN(conf.is_host, ReadBool(key, value));
  } else if (key == "any_program") {
    DDP_ASSIGN_OR_RETURN(conf.any_program, ReadBool(key, value));
  } else if (std::find(std::begin(kTlsFiles), std::end(kTlsFiles), key) != std::end(kTlsFiles)) {
    conf.tls_files.emplace_back(key, value);
  } else if (key == "store_type") {
    conf.without_meaning.push_back(key);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown key ", Shown(key), ": expected some of ", KnownKeys()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RendezvousConf> ParseRendezvousConf(const std::string& text) {
  RendezvousConf conf;
  std::optional<absl::Duration> timeout;
  if (absl::StripAsciiWhitespace(text).empty()) return conf;
  const std::vector<std::string> pairs = absl::StrSplit(text, ',');
  for (const std::string& pair : pairs) {
    const size_t equals = pair.find('=');
    const std::string key(absl::StripAsciiWhitespace(pair.substr(0, equals)));
    const std::string value(
        equals == std::string::npos ? "" : absl::StripAsciiWhitespace(pair.substr(equals + 1)));
    if (key.empty() || value.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", Shown(pair), "': expected KEY=VALUE with commas between"));
    }
    DDP_RETURN_IF_ERROR(ReadPair(key, value, conf, timeout));
  }
  if (!conf.join_timeout.has_value()) conf.join_timeout = timeout;
  return conf;
}

}  // namespace ddp::launcher
