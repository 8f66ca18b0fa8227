#include "launcher/meeting/address_proof.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_replace.h"

namespace ddp::launcher {
namespace {

const ProvenAddress kAddress = {.master = "head:29500", .host = "10.0.0.1", .port = 4711};
constexpr char kPassword[] = "open sesame";

TEST(AddressProofTest, TheOneWhoKnowsThePasswordIsBelieved) {
  const std::string nonce = *MakeNonce();
  const std::string answer = AnswerChallenge(kPassword, kAddress, nonce, *MakeNonce());
  EXPECT_EQ(answer.find(kPassword), std::string::npos);
  const auto checked = CheckAnswer(kPassword, nonce, answer);
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_EQ(*checked, kAddress);
}

TEST(AddressProofTest, NobodyElseIs) {
  const std::string nonce = *MakeNonce();
  const std::string own_nonce = *MakeNonce();
  const std::string answer = AnswerChallenge(kPassword, kAddress, nonce, own_nonce);
  const auto refused = [](const std::string& password, const std::string& asked,
                          const std::string& text) {
    return absl::IsUnauthenticated(CheckAnswer(password, asked, text).status());
  };
  EXPECT_TRUE(refused("another", nonce, answer));
  EXPECT_TRUE(refused("", nonce, answer));
  EXPECT_TRUE(refused(kPassword, *MakeNonce(), answer)) << "an answer of yesterday";
  for (const auto& [from, to] : {std::pair<std::string, std::string>("10.0.0.1", "10.0.0.2"),
                                 {"4711", "4712"},
                                 {"head:29500", "head:29501"},
                                 {own_nonce, *MakeNonce()},
                                 {"\"proof\":\"", "\"proof\":\"0"}}) {
    const std::string changed = absl::StrReplaceAll(answer, {{from, to}});
    ASSERT_NE(changed, answer) << from;
    EXPECT_TRUE(refused(kPassword, nonce, changed)) << from;
  }
}

TEST(AddressProofTest, FieldsCannotBeShiftedIntoEachOther) {
  const std::string nonce = *MakeNonce();
  ProvenAddress one = kAddress;
  ProvenAddress two = kAddress;
  one.master = "ab";
  one.host = "c";
  two.master = "a";
  two.host = "bc";
  const std::string own_nonce = *MakeNonce();
  const std::string answer = AnswerChallenge(kPassword, one, nonce, own_nonce);
  const std::string shifted = absl::StrReplaceAll(
      answer, {{"\"master\":\"ab\"", "\"master\":\"a\""}, {"\"host\":\"c\"", "\"host\":\"bc\""}});
  EXPECT_TRUE(absl::IsUnauthenticated(CheckAnswer(kPassword, nonce, shifted).status()));
}

TEST(AddressProofTest, WhatIsNoAnswerIsRefused) {
  const std::string nonce = *MakeNonce();
  const std::string good = AnswerChallenge(kPassword, kAddress, nonce, *MakeNonce());
  for (const std::string& text :
       {std::string(), std::string("x"), std::string("[]"), std::string("{}"),
        absl::StrReplaceAll(good, {{"4711", "0"}}), absl::StrReplaceAll(good, {{"4711", "65536"}}),
        absl::StrReplaceAll(good, {{"4711", "\"4711\""}}),
        absl::StrReplaceAll(good, {{"10.0.0.1", ""}}),
        absl::StrReplaceAll(good, {{"\"nonce\":\"", "\"nonce\":\"1"}})}) {
    EXPECT_TRUE(absl::IsDataLoss(CheckAnswer(kPassword, nonce, text).status())) << text;
  }
  EXPECT_EQ(AnswerChallenge(kPassword, kAddress, "", *MakeNonce()), "");
  EXPECT_EQ(AnswerChallenge(kPassword, kAddress, nonce.substr(1), *MakeNonce()), "");
  EXPECT_EQ(AnswerChallenge(kPassword, kAddress, nonce.substr(1) + "g", *MakeNonce()), "");
}

}  // namespace
}  // namespace ddp::launcher
