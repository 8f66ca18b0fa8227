#include "elastic/rendezvous/rendezvous_messages.h"

#include <string>
#include <utility>
#include <vector>

#include "elastic/job/job_spec.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using store::RedisReply;

RedisReply Texts(const std::vector<std::string>& texts) {
  std::vector<RedisReply> parts;
  for (const std::string& text : texts) parts.push_back(RedisReply::String(text));
  return RedisReply::Array(std::move(parts));
}

constexpr char kRow[] = "1 3 3 2 10 2 5 20000\ntrainer\nhost-b\n10.0.0.1";

TEST(RendezvousMessagesTest, ARowIsAPlacement) {
  const absl::StatusOr<NodePlacement> placement = ParseRow(kRow);
  ASSERT_TRUE(placement.ok()) << placement.status();
  const NodePlacement expected = {.group_rank = 1,
                                  .group_world_size = 3,
                                  .local_world_size = 3,
                                  .first_rank = 2,
                                  .world_size = 10,
                                  .first_role_rank = 2,
                                  .role_world_size = 5,
                                  .master_addr = "10.0.0.1",
                                  .master_port = 20'000};
  EXPECT_EQ(*placement, expected);
}

TEST(RendezvousMessagesTest, RefusesRowsThatCannotBe) {
  for (const std::string& row : std::vector<std::string>{
           "", "\n\n\n", "1 3 3 2 10 2 5\na\nb\nc", "1 3 3 2 10 2 5 x\na\nb\nc",
           "-1 3 3 2 10 2 5 20000\na\nb\nc", "1 3 3 2 99999999999 2 5 20000\na\nb\nc",
           "3 3 3 2 10 2 5 20000\na\nb\nc", "1 3 3 2 10 2 5 70000\na\nb\nc",
           std::string(kRow) + "\nmore", std::string(kRow) + std::string(9000, 'x')}) {
    EXPECT_EQ(ParseRow(row).status().code(), absl::StatusCode::kInternal) << row;
  }
}

TEST(RendezvousMessagesTest, AnOfferIsFourLinesWhateverItHolds) {
  const std::string offer = FormatOffer({.nproc = 8,
                                         .role = "a\nb",
                                         .host = "h\r\n\x01",
                                         .master_addr = std::string(5000, 'x'),
                                         .master_port = 20'000,
                                         .node_rank = -1});
  EXPECT_EQ(offer, "8 20000 -1\na b\nh   \n" + std::string(1024, 'x'));
}

TEST(RendezvousMessagesTest, ALongLineIsNotCutInTheMiddleOfACharacter) {
  std::string text(1023, 'x');
  text += "\xC3\xA9";  // é
  EXPECT_EQ(OneLine(text), std::string(1023, 'x'));
}

TEST(RendezvousMessagesTest, ReadsARound) {
  const absl::StatusOr<ScriptReply> reply =
      ParseScriptReply(Texts({"round", "7", "00ff", "2", kRow, "node b was lost", "0"}));
  ASSERT_TRUE(reply.ok()) << reply.status();
  const absl::StatusOr<Round> round = ParseRoundReply(*reply);
  ASSERT_TRUE(round.ok()) << round.status();
  EXPECT_EQ(round->generation, (GenerationId{7, "00ff"}));
  EXPECT_EQ(round->restarts, 2);
  EXPECT_EQ(round->placement.group_rank, 1);
  EXPECT_EQ(round->reason, "node b was lost");
  EXPECT_FALSE(round->charged);
}

TEST(RendezvousMessagesTest, RefusesRepliesOutOfShape) {
  EXPECT_FALSE(ParseScriptReply(RedisReply::Integer(1)).ok());
  EXPECT_FALSE(ParseScriptReply(RedisReply()).ok());
  EXPECT_FALSE(ParseScriptReply(Texts({"ok", "1", "n"})).ok());
  EXPECT_FALSE(ParseScriptReply(Texts({"ok", "-1", "n", "0"})).ok());
  EXPECT_FALSE(ParseScriptReply(Texts({"ok", "99999999999999999", "n", "0"})).ok());
  EXPECT_FALSE(ParseScriptReply(Texts({"ok", "1", "n", "4294967296"})).ok());
  EXPECT_FALSE(ParseScriptReply(Texts({"ok", "1", std::string(65, 'n'), "0"})).ok());
  EXPECT_FALSE(ParseScriptReply(Texts({"ok", "1", "n", "0", std::string(9000, 'x')})).ok());
  EXPECT_FALSE(ParseScriptReply(Texts(std::vector<std::string>(17, "1"))).ok());
  EXPECT_FALSE(ParseScriptReply(RedisReply::Array({RedisReply::Array({})})).ok());
  EXPECT_FALSE(ParseRoundReply(*ParseScriptReply(Texts({"round", "0", "", "0", kRow}))).ok());
  EXPECT_FALSE(ParseRoundReply(*ParseScriptReply(Texts({"round", "1", "n", "0"}))).ok());
}

TEST(RendezvousMessagesTest, ReadsAnEnd) {
  const auto end = [](const std::string& kind, const std::string& code) {
    return ParseEndReply(*ParseScriptReply(Texts({"ended", "1", "n", "0", kind, code, "why"})));
  };
  EXPECT_EQ(end("succeeded", "0").kind, JobEnd::Kind::kSucceeded);
  EXPECT_EQ(end("budget_spent", "137"), (JobEnd{JobEnd::Kind::kBudgetSpent, "why", 137}));
  EXPECT_EQ(end("no_progress", "3").kind, JobEnd::Kind::kNoProgress);
  EXPECT_EQ(end("anything", "-4"), (JobEnd{JobEnd::Kind::kClosed, "why", 0}));
  const auto reply = ParseScriptReply(Texts({"ended", "1", "n", "0", "budget_spent", "3", "why",
                                             "node\x1b"
                                             "b"}));
  EXPECT_EQ(ParseEndReply(*reply).host, "node b");
}

TEST(RendezvousMessagesTest, ReadsPushedMessages) {
  using Kind = PushedMessage::Kind;
  absl::StatusOr<PushedMessage> message = ParsePushedMessage("t\nover\n3\nnn\nnode b was lost");
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->token, "t");
  EXPECT_EQ(message->kind, Kind::kOver);
  EXPECT_EQ(message->generation, (GenerationId{3, "nn"}));
  EXPECT_EQ(message->cause, "node b was lost");
  message = ParsePushedMessage("t\ndrain\n3\nnn\n117\nnode c joins");
  EXPECT_EQ(message->stop_at_step, 117);
  EXPECT_EQ(message->cause, "node c joins");
  EXPECT_EQ(ParsePushedMessage("t\ndrain\n3\nnn\n-1\nx")->stop_at_step, -1);
  EXPECT_EQ(ParsePushedMessage("t\nround\n3\nnn")->kind, Kind::kRound);
  EXPECT_EQ(ParsePushedMessage("t\nended\n3\nnn\nsucceeded\n0\n")->end.kind,
            JobEnd::Kind::kSucceeded);
  EXPECT_EQ(ParsePushedMessage("t\nended\n3\nnn\nbudget_spent\n3\nwhy\nb")->end.host, "b");
}

TEST(RendezvousMessagesTest, RefusesPushedNonsense) {
  for (const std::string& text : std::vector<std::string>{
           "", "t\nover\n3", "t\nover\nx\nnn\n", "t\nunheard-of\n3\nnn", "t\ndrain\n3\nnn\n-2\nx",
           "t\ndrain\n3\nnn", "t\ndrain\n3\nnn\n1e9\nx", std::string(9000, '\n')}) {
    EXPECT_FALSE(ParsePushedMessage(text).ok()) << text;
  }
}

TEST(RendezvousMessagesTest, ReadsAnInstance) {
  const absl::StatusOr<OpenedInstance> opened =
      ParseOpenedInstance(Texts({"3", "tok", "3000", "5", "2", "4", ""}));
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->number, 3);
  EXPECT_EQ(opened->token, "tok");
  EXPECT_FALSE(ParseOpenedInstance(Texts({"0", "tok", "3000", "5", "2", "4", ""})).ok());
  EXPECT_FALSE(ParseOpenedInstance(Texts({"1", "tok", "0", "5", "2", "4", ""})).ok());
  EXPECT_EQ(opened->limits, (JobLimits{.max_restarts = 5, .min_nodes = 2, .max_nodes = 4}));
  EXPECT_FALSE(ParseOpenedInstance(Texts({"1", "tok", "3000", "-1", "2", "4", ""})).ok());
  EXPECT_FALSE(ParseOpenedInstance(Texts({"1", "tok"})).ok());
}

}  // namespace
}  // namespace ddp::elastic
