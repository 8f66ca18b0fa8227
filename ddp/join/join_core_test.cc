#include "ddp/join/join_core.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "testing/story_replay.h"

namespace ddp::internal {
namespace {

using Words = std::vector<std::string>;

int Number(const std::string& text) {
  int number = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &number)) << text;
  return number;
}

// Stories of all ranks of a Join. Each rank reads the words of all of them.
//
//   options ranks=3 [joinables=2] [throw] [rank_1=divide_by_active|throw|three_joinables]
//   > words 0.1 0.1 joined          joinable 0, event 1 on the ranks 0 and 1; rank 2 has joined
//   > words 0.1 joined x1000        the same exchange a thousand times; the last one is told
//   > overlap 1.3 0                 rank 0 announces joinable 1, event 3, while 0 is busy
class Story : public testing::StoryPlayer {
 public:
  void SetOptions(const Words& words) override {
    JoinTerms terms;
    int size = 1;
    std::string odd;
    for (const std::string& word : words) {
      const std::vector<std::string> parts = absl::StrSplit(word, '=');
      if (parts[0] == "ranks") size = Number(parts[1]);
      if (parts[0] == "joinables") terms.joinables = Number(parts[1]);
      if (parts[0] == "throw") terms.throw_on_early_termination = true;
      if (parts[0] == "rank_1") odd = parts[1];
    }
    for (int rank = 0; rank < size; ++rank) {
      JoinTerms own = terms;
      if (rank == 1 && odd == "divide_by_active") own.divide_by_initial_world_size = false;
      if (rank == 1 && odd == "throw") own.throw_on_early_termination = true;
      if (rank == 1 && odd == "three_joinables") own.joinables = 3;
      JoinCore::Names names;
      names.joinable = [](size_t joinable) { return joinable == 0 ? "net" : ""; };
      names.event = [](size_t joinable, int event) { return absl::StrCat("the event ", event); };
      ranks_.push_back(std::make_unique<JoinCore>(rank, size, own, std::move(names)));
    }
  }

  std::vector<std::string> Play(const Words& words) override {
    if (words[0] == "overlap") {
      return {absl::StrCat("error: ", ranks_[0]->Overlap(*Parse(words[1]), Number(words[2])))};
    }
    EXPECT_EQ(words[0], "words");
    const bool repeated = absl::StartsWith(words.back(), "x");
    std::vector<std::string> lines;
    for (int i = repeated ? Number(words.back().substr(1)) : 1; i > 0; --i) lines = Exchange(words);
    return lines;
  }

 private:
  static std::optional<JoinAnnouncement> Parse(const std::string& text) {
    if (text == "joined") return std::nullopt;
    const std::vector<std::string> parts = absl::StrSplit(text, '.');
    return JoinAnnouncement{.joinable = Number(parts[0]), .event = Number(parts[1])};
  }

  std::vector<std::string> Exchange(const Words& words) {
    std::vector<int64_t> sent;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      sent.push_back(ranks_[rank]->WordOf(Parse(words[rank + 1])));
    }
    std::vector<std::string> lines;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const JoinVerdict verdict = ranks_[rank]->Read(sent);
      const std::string line =
          absl::StrCat(Text(verdict), ", last joiner ", ranks_[rank]->last_joiner());
      // Most verdicts are the same on every rank.
      if (lines.empty() || !absl::EndsWith(lines.back(), ": " + line)) {
        lines.push_back(absl::StrCat("from rank ", rank, ": ", line));
      }
      if (const auto warning = ranks_[rank]->Warning()) lines.push_back("warning: " + *warning);
    }
    return lines;
  }

  static std::string Text(const JoinVerdict& verdict) {
    switch (verdict.kind) {
      case JoinVerdict::Kind::kRound:
        return absl::StrCat("round of joinable ", verdict.announcement.joinable, ", event ",
                            verdict.announcement.event, ", active ",
                            absl::StrJoin(verdict.active_ranks, " "));
      case JoinVerdict::Kind::kAllJoined:
        return "all have joined";
      case JoinVerdict::Kind::kDifferentJoins:
        return "different Joins: " + verdict.message;
      case JoinVerdict::Kind::kDifferentEvents:
        return "different events: " + verdict.message;
      case JoinVerdict::Kind::kEarlyTermination:
        return "early termination: " + verdict.message;
    }
    return "";
  }

  std::vector<std::unique_ptr<JoinCore>> ranks_;
};

}  // namespace
}  // namespace ddp::internal

int main(int argc, char** argv) {
  return ddp::testing::RunStories(
      argc, argv,
      {.name = "JoinCoreTest",
       .folder = "testing/scenarios/join",
       .target = "//ddp/join:join_core_test",
       .make_player = [] { return std::make_unique<ddp::internal::Story>(); }});
}
