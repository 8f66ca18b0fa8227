#include "launcher/launch_options.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "launcher/command_line.h"

namespace ddp::launcher {
namespace {

using Spelled = std::map<std::string, std::string>;

// What the user wrote to set `gflag`, or the flag's name where it has its default.
std::string NameOf(const std::string& gflag, const Spelled& spelled) {
  const auto found = spelled.find(gflag);
  if (found != spelled.end()) return found->second;
  for (const FlagSpec& flag : kFlagTable) {
    if (flag.gflag != nullptr && gflag == flag.gflag) return absl::StrCat("--", flag.name);
  }
  return absl::StrCat("--", gflag);
}

absl::Status BadValue(const std::string& gflag, const std::string& value, const Spelled& spelled,
                      const std::string& expected) {
  return absl::InvalidArgumentError(
      absl::StrCat(NameOf(gflag, spelled), "=", value, ": ", expected));
}

// Digits with an optional minus; no blanks, no plus.
bool ParseInteger(const std::string& text, int64_t* value) {
  const size_t digits = text.rfind('-', 0) == 0 ? 1 : 0;
  if (text.size() == digits) return false;
  if (!std::all_of(text.begin() + static_cast<std::ptrdiff_t>(digits), text.end(),
                   [](unsigned char c) { return std::isdigit(c) != 0; })) {
    return false;
  }
  return absl::SimpleAtoi(text, value);
}

struct Range {
  int64_t min;
  int64_t max;
};

absl::StatusOr<int64_t> Integer(const std::string& gflag, const std::string& text, Range range,
                                const Spelled& spelled) {
  int64_t value = 0;
  if (!ParseInteger(text, &value) || value < range.min || value > range.max) {
    return BadValue(gflag, text, spelled,
                    absl::StrCat("expected a whole number from ", range.min, " to ", range.max));
  }
  return value;
}

absl::Status CheckNodes(const std::string& text, const Spelled& spelled) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  int64_t min = 0;
  int64_t max = 0;
  if (parts.size() > 2 || !ParseInteger(parts.front(), &min) || !ParseInteger(parts.back(), &max) ||
      min < 1 || max < min) {
    return BadValue("nnodes", text, spelled,
                    "expected N or MIN:MAX with 1 <= MIN <= MAX (this version runs one node: 1)");
  }
  if (max != 1) {
    return BadValue("nnodes", text, spelled, "this version runs one node only: expected 1 or 1:1");
  }
  return absl::OkStatus();
}

// Far above any real host, low enough that a mistyped number is no fork bomb.
constexpr int kMaxProcessesPerNode = 4096;

absl::StatusOr<int> ProcessesPerNode(const std::string& text, const HostResources& host,
                                     const Spelled& spelled) {
  if (text == "cpu") return host.cpus;
  if (text == "auto") return host.gpus > 0 ? host.gpus : host.cpus;
  if (text == "gpu") {
    if (host.gpus > 0) return host.gpus;
    return BadValue("nproc_per_node", text, spelled,
                    "this host shows no GPU (/dev/nvidia0, ..., narrowed by CUDA_VISIBLE_DEVICES);"
                    " give a number, cpu or auto");
  }
  int64_t value = 0;
  if (!ParseInteger(text, &value) || value < 1 || value > kMaxProcessesPerNode) {
    return BadValue(
        "nproc_per_node", text, spelled,
        absl::StrCat("expected a number from 1 to ", kMaxProcessesPerNode, ", cpu, gpu or auto"));
  }
  return static_cast<int>(value);
}

absl::StatusOr<absl::Duration> Seconds(const std::string& gflag, const std::string& text,
                                       const Spelled& spelled) {
  constexpr double kMaxSeconds = 7 * 24 * 3600;
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || !(value >= 0 && value <= kMaxSeconds)) {
    return BadValue(gflag, text, spelled, absl::StrCat("expected seconds from 0 to ", kMaxSeconds));
  }
  return absl::Seconds(value);
}

absl::StatusOr<ProgramKind> KindOfProgram(const FlagValues& values, const Spelled& spelled) {
  const auto conflict = [&](const char* a, const char* b) {
    return absl::InvalidArgumentError(absl::StrCat(NameOf(a, spelled), " and ", NameOf(b, spelled),
                                                   " contradict each other: give one of them"));
  };
  if (values.no_python && values.module) return conflict("no_python", "module");
  if (values.no_python && values.run_path) return conflict("no_python", "run_path");
  if (values.run_path && values.module) return conflict("run_path", "module");
  if (values.no_python) return ProgramKind::kExecutable;
  if (values.module) return ProgramKind::kPythonModule;
  if (values.run_path) return ProgramKind::kPythonScript;
  return ProgramKind::kByName;
}

bool IsPrintable(const std::string& text) {
  return std::none_of(text.begin(), text.end(),
                      [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

// Names end up in environment variables, key and folder names and log prefixes.
absl::Status CheckName(const std::string& gflag, const std::string& text, const Spelled& spelled) {
  constexpr size_t kMaxLength = 128;
  if (text.empty() || text.size() > kMaxLength || !IsPrintable(text)) {
    return BadValue(gflag, text.size() > kMaxLength ? text.substr(0, kMaxLength) + "..." : text,
                    spelled, absl::StrCat("expected 1 to ", kMaxLength, " printable characters"));
  }
  return absl::OkStatus();
}

absl::StatusOr<StreamMap> StreamsFlag(const std::string& gflag, const std::string& text,
                                      const Spelled& spelled) {
  absl::StatusOr<StreamMap> map = ParseStreamMap(text);
  if (!map.ok()) return BadValue(gflag, text, spelled, std::string(map.status().message()));
  return map;
}

absl::Status CheckNames(const FlagValues& values, const Spelled& spelled) {
  DDP_RETURN_IF_ERROR(CheckName("role", values.role, spelled));
  DDP_RETURN_IF_ERROR(CheckName("master_addr", values.master_addr, spelled));
  if (!values.rdzv_id.empty() || spelled.count("rdzv_id") != 0) {
    DDP_RETURN_IF_ERROR(CheckName("rdzv_id", values.rdzv_id, spelled));
  }
  if (values.rdzv_backend != "redis") {
    return BadValue("rdzv_backend", values.rdzv_backend, spelled,
                    "this version meets in Redis only: expected redis");
  }
  return absl::OkStatus();
}

}  // namespace

int StreamMap::Get(int local_rank) const {
  const auto found = by_local_rank.find(local_rank);
  return found == by_local_rank.end() ? all : found->second;
}

bool StreamMap::empty() const {
  return all == kNoStream &&
         std::all_of(by_local_rank.begin(), by_local_rank.end(),
                     [](const auto& entry) { return entry.second == kNoStream; });
}

absl::StatusOr<StreamMap> ParseStreamMap(const std::string& text) {
  const std::string expected =
      "expected 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or a list by local rank such as"
      " 0:1,1:3";
  const auto stream_bits = [](const std::string& bits, int* value) {
    if (bits.size() != 1 || bits[0] < '0' || bits[0] > '3') return false;
    *value = bits[0] - '0';
    return true;
  };
  StreamMap map;
  if (stream_bits(text, &map.all)) return map;
  const std::vector<std::string> pairs = absl::StrSplit(text, ',');
  for (const std::string& pair : pairs) {
    const size_t colon = pair.find(':');
    int64_t local_rank = 0;
    int bits = 0;
    if (colon == std::string::npos || !ParseInteger(pair.substr(0, colon), &local_rank) ||
        local_rank < 0 || local_rank > std::numeric_limits<int>::max() ||
        !stream_bits(pair.substr(colon + 1), &bits)) {
      return absl::InvalidArgumentError(expected);
    }
    if (!map.by_local_rank.emplace(static_cast<int>(local_rank), bits).second) {
      return absl::InvalidArgumentError(absl::StrCat("local rank ", local_rank, " is named twice"));
    }
  }
  return map;
}

absl::StatusOr<LaunchOptions> ParseLaunchOptions(const FlagValues& values, const Spelled& spelled,
                                                 const HostResources& host) {
  constexpr int64_t kMaxMilliseconds = 24 * 3600 * 1000;
  LaunchOptions options;
  DDP_RETURN_IF_ERROR(CheckNodes(values.nnodes, spelled));
  DDP_RETURN_IF_ERROR(CheckNames(values, spelled));
  DDP_ASSIGN_OR_RETURN(options.nproc_per_node,
                       ProcessesPerNode(values.nproc_per_node, host, spelled));
  DDP_ASSIGN_OR_RETURN(const int64_t port,
                       Integer("master_port", values.master_port, {0, 65535}, spelled));
  DDP_ASSIGN_OR_RETURN(options.program_kind, KindOfProgram(values, spelled));
  DDP_ASSIGN_OR_RETURN(const int64_t lease_ms,
                       Integer("lease_ms", values.lease_ms, {100, kMaxMilliseconds}, spelled));
  DDP_ASSIGN_OR_RETURN(
      const int64_t max_restarts,
      Integer("max_restarts", values.max_restarts, {0, std::numeric_limits<int>::max()}, spelled));
  DDP_ASSIGN_OR_RETURN(
      const int64_t fault_grace_ms,
      Integer("fault_grace_ms", values.fault_grace_ms, {0, kMaxMilliseconds}, spelled));
  DDP_ASSIGN_OR_RETURN(options.shutdown_timeout,
                       Seconds("shutdown_timeout", values.shutdown_timeout, spelled));
  DDP_ASSIGN_OR_RETURN(options.redirects, StreamsFlag("redirects", values.redirects, spelled));
  DDP_ASSIGN_OR_RETURN(options.tee, StreamsFlag("tee", values.tee, spelled));
  options.role = values.role;
  options.master_addr = values.master_addr;
  options.master_port = static_cast<int>(port);
  if (!values.standalone) options.rdzv_endpoint = values.rdzv_endpoint;
  options.run_id = values.rdzv_id;
  options.lease = absl::Milliseconds(lease_ms);
  options.max_restarts = static_cast<int>(max_restarts);
  options.fault_grace = absl::Milliseconds(fault_grace_ms);
  options.log_dir = values.worker_log_dir;
  options.event_log_file = values.event_log_file;
  return options;
}

}  // namespace ddp::launcher
