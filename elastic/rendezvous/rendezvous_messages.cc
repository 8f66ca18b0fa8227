#include "elastic/rendezvous/rendezvous_messages.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace ddp::elastic {
namespace {

using store::RedisReply;

constexpr size_t kLineBytesMax = 1024;
constexpr size_t kMessageBytesMax = 8192;
constexpr size_t kReplyPartsMax = 16;
// Numbers above this are refused: Lua holds numbers exactly up to 2^53, and they are counted up.
constexpr int64_t kNumberMax = int64_t{1} << 50;

absl::Status Bad(const std::string& what) {
  return absl::InternalError(absl::StrCat("the rendezvous answers nonsense: ", what));
}

absl::StatusOr<int64_t> ParseNumber(const std::string& text, int64_t max) {
  int64_t number = 0;
  if (!absl::SimpleAtoi(text, &number) || number < 0 || number > max) {
    return Bad(absl::StrCat("number '", OneLine(text.substr(0, 40)), "'"));
  }
  return number;
}

absl::StatusOr<GenerationId> ParseGeneration(const std::string& number, std::string nonce) {
  GenerationId generation;
  DDP_ASSIGN_OR_RETURN(const int64_t parsed, ParseNumber(number, kNumberMax));
  generation.number = static_cast<uint64_t>(parsed);
  if (nonce.size() > 64) return Bad("a nonce that is too long");
  generation.nonce = std::move(nonce);
  return generation;
}

JobEnd MakeEnd(const std::string& kind, const std::string& exit_code, const std::string& reason,
               const std::string& host) {
  using Kind = JobEnd::Kind;
  JobEnd end;
  end.kind = Kind::kClosed;
  for (const Kind known :
       {Kind::kSucceeded, Kind::kBudgetSpent, Kind::kNoProgress, Kind::kNodesLost}) {
    if (kind == JobEndName(known)) end.kind = known;
  }
  int code = 0;
  if (absl::SimpleAtoi(exit_code, &code) && code >= 0 && code <= 255) end.exit_code = code;
  end.reason = OneLine(reason);
  end.host = OneLine(host);
  return end;
}

}  // namespace

std::string OneLine(const std::string& text) {
  std::string line = text.substr(0, kLineBytesMax);
  // Do not cut in the middle of a UTF-8 character.
  if (line.size() < text.size()) {
    while (!line.empty() && (static_cast<unsigned char>(text[line.size()]) & 0xC0) == 0x80) {
      line.pop_back();
    }
  }
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < ' ' || c == 0x7F) c = ' ';
  }
  return line;
}

std::string FormatOffer(const NodeOffer& offer) {
  return absl::StrCat(std::max(0, offer.nproc), " ", std::max(0, offer.master_port), " ",
                      std::max(-1, offer.node_rank), "\n", OneLine(offer.role), "\n",
                      OneLine(offer.host), "\n", OneLine(offer.master_addr));
}

absl::StatusOr<NodePlacement> ParseRow(const std::string& row) {
  if (row.size() > kMessageBytesMax) return Bad("a row that is too long");
  const std::vector<std::string> lines = absl::StrSplit(row, '\n');
  const std::vector<std::string> words = absl::StrSplit(lines[0], ' ');
  if (lines.size() != 4 || words.size() != 8) return Bad("a row out of shape");
  NodePlacement placement;
  placement.master_addr = lines[3];
  const std::array<int*, 8> numbers = {&placement.group_rank,       &placement.group_world_size,
                                       &placement.local_world_size, &placement.first_rank,
                                       &placement.world_size,       &placement.first_role_rank,
                                       &placement.role_world_size,  &placement.master_port};
  for (size_t i = 0; i < numbers.size(); ++i) {
    DDP_ASSIGN_OR_RETURN(const int64_t number,
                         ParseNumber(words[i], std::numeric_limits<int>::max()));
    *numbers[i] = static_cast<int>(number);
  }
  DDP_RETURN_IF_ERROR(ValidatePlacement(placement));
  return placement;
}

std::string ScriptReply::text(size_t index) const {
  return index < rest.size() ? rest[index] : std::string();
}

int64_t ScriptReply::number(size_t index, int64_t otherwise) const {
  int64_t number = 0;
  return absl::SimpleAtoi(text(index), &number) && number <= kNumberMax && number >= -1 ? number
                                                                                        : otherwise;
}

absl::StatusOr<ScriptReply> ParseScriptReply(RedisReply reply) {
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> parts, std::move(reply).AsArray());
  if (parts.size() < 4 || parts.size() > kReplyPartsMax) {
    return Bad(absl::StrCat(parts.size(), " parts"));
  }
  std::vector<std::string> texts;
  for (RedisReply& part : parts) {
    DDP_ASSIGN_OR_RETURN(texts.emplace_back(), std::move(part).AsString());
    if (texts.back().size() > kMessageBytesMax) return Bad("a part that is too long");
  }
  ScriptReply parsed;
  parsed.outcome = OneLine(texts[0]);
  DDP_ASSIGN_OR_RETURN(parsed.generation, ParseGeneration(texts[1], texts[2]));
  DDP_ASSIGN_OR_RETURN(const int64_t restarts,
                       ParseNumber(texts[3], std::numeric_limits<int>::max()));
  parsed.restarts = static_cast<int>(restarts);
  parsed.rest.assign(std::make_move_iterator(texts.begin() + 4),
                     std::make_move_iterator(texts.end()));
  return parsed;
}

absl::StatusOr<Round> ParseRoundReply(const ScriptReply& reply) {
  if (reply.generation.number == 0) return Bad("a round without a generation");
  Round round;
  round.generation = reply.generation;
  round.restarts = reply.restarts;
  DDP_ASSIGN_OR_RETURN(round.placement, ParseRow(reply.text(0)));
  round.reason = OneLine(reply.text(1));
  round.charged = reply.text(2) == "1";
  return round;
}

JobEnd ParseEndReply(const ScriptReply& reply) {
  return MakeEnd(reply.text(0), reply.text(1), reply.text(2), reply.text(3));
}

std::optional<RankAtWork> ParseRankAtWork(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits(' ', 3));
  if (parts.size() != 4) return std::nullopt;
  const absl::StatusOr<int64_t> stalled_ms = ParseNumber(parts[0], kNumberMax);
  const absl::StatusOr<int64_t> rank = ParseNumber(parts[1], std::numeric_limits<int>::max());
  if (!stalled_ms.ok() || !rank.ok()) return std::nullopt;
  return RankAtWork{.rank = static_cast<int>(*rank),
                    .phase = OneLine(parts[2]),
                    .stalled_for = absl::Milliseconds(*stalled_ms),
                    .host = OneLine(parts[3])};
}

absl::StatusOr<OpenedInstance> ParseOpenedInstance(const RedisReply& reply) {
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> parts, reply.AsArray());
  if (parts.size() != 7) return Bad("an instance in other than seven parts");
  OpenedInstance instance;
  DDP_ASSIGN_OR_RETURN(instance.number, parts[0].AsInteger());
  DDP_ASSIGN_OR_RETURN(instance.token, parts[1].AsString());
  DDP_ASSIGN_OR_RETURN(instance.lease_ms, parts[2].AsInteger());
  std::array<int64_t, 3> limits{};
  for (size_t i = 0; i < limits.size(); ++i) {
    DDP_ASSIGN_OR_RETURN(limits[i], parts[i + 3].AsInteger());
    if (limits[i] < 0 || limits[i] > std::numeric_limits<int>::max()) return Bad("a job's limits");
  }
  DDP_ASSIGN_OR_RETURN(instance.evicting_policy, parts[6].AsString());
  instance.limits = {.max_restarts = static_cast<int>(limits[0]),
                     .min_nodes = static_cast<int>(limits[1]),
                     .max_nodes = static_cast<int>(limits[2])};
  if (instance.number < 1 || instance.number > kNumberMax || instance.token.size() > 64 ||
      instance.lease_ms < 1 || instance.lease_ms > kNumberMax) {
    return Bad("an instance that cannot be");
  }
  return instance;
}

absl::StatusOr<PushedMessage> ParsePushedMessage(const std::string& text) {
  if (text.size() > kMessageBytesMax) return Bad("a message that is too long");
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  if (lines.size() < 4) return Bad("half a message");
  const auto line = [&lines](size_t i) { return i < lines.size() ? lines[i] : std::string(); };
  using Kind = PushedMessage::Kind;
  PushedMessage message;
  message.token = lines[0];
  DDP_ASSIGN_OR_RETURN(message.generation, ParseGeneration(lines[2], lines[3]));
  if (lines[1] == "round") {
    message.kind = Kind::kRound;
  } else if (lines[1] == "over") {
    message.kind = Kind::kOver;
    message.cause = OneLine(line(4));
  } else if (lines[1] == "drain") {
    message.kind = Kind::kDrain;
    if (line(4) != "-1") {
      DDP_ASSIGN_OR_RETURN(message.stop_at_step, ParseNumber(line(4), kNumberMax));
    }
    message.cause = OneLine(line(5));
  } else if (lines[1] == "ended" && line(4) == "abandoned") {
    message.kind = Kind::kAbandoned;
  } else if (lines[1] == "ended") {
    message.kind = Kind::kEnded;
    message.end = MakeEnd(line(4), line(5), line(6), line(7));
  } else {
    return Bad(absl::StrCat("message ", OneLine(lines[1]).substr(0, 40)));
  }
  return message;
}

}  // namespace ddp::elastic
