#include "elastic/checkpoint/folder/checkpoint_owner.h"

#include <string>

#include "elastic/checkpoint/folder/work_folder.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

const CheckpointOwner kSaved = {
    .run_id = "digits", .generation = 1, .nonce = "aa", .instance = 1, .job = "token"};

CheckpointOwner Later() {
  CheckpointOwner owner = kSaved;
  owner.generation = 2;
  owner.nonce = "bb";
  return owner;
}

TEST(MayBeOfOneJobTest, ALaterGenerationIs) { EXPECT_TRUE(MayBeOfOneJob(Later(), kSaved)); }

// The job runs again under the same run ID, on a server that has lost the data of the first run.
TEST(MayBeOfOneJobTest, AnotherTokenIsAnotherJobWhateverTheInstance) {
  CheckpointOwner other = Later();
  other.job = "other";
  EXPECT_FALSE(MayBeOfOneJob(other, kSaved));
}

// The server has lost its data, and the same job got another instance number.
TEST(MayBeOfOneJobTest, TheSameTokenIsTheSameJobWhateverTheInstance) {
  CheckpointOwner renumbered = Later();
  renumbered.instance = 2;
  EXPECT_TRUE(MayBeOfOneJob(renumbered, kSaved));
}

TEST(MayBeOfOneJobTest, WithoutATokenTheInstanceDecides) {
  CheckpointOwner silent = Later();
  silent.job = "";
  EXPECT_TRUE(MayBeOfOneJob(silent, kSaved));
  EXPECT_TRUE(MayBeOfOneJob(kSaved, silent));
  silent.instance = 2;
  EXPECT_FALSE(MayBeOfOneJob(silent, kSaved));
  silent.instance = 0;  // as under another launcher
  EXPECT_TRUE(MayBeOfOneJob(silent, kSaved));
}

TEST(MayBeOfOneJobTest, AnotherRunIdIsAnotherJob) {
  CheckpointOwner other = Later();
  other.run_id = "letters";
  EXPECT_FALSE(MayBeOfOneJob(other, kSaved));
  other.run_id = "";  // the text of a claim may be damaged
  EXPECT_TRUE(MayBeOfOneJob(other, kSaved));
}

TEST(OwnerNonceTest, IsThatOfAGenerationWithANumber) { EXPECT_EQ(OwnerNonce(3, "5f2a"), "5f2a"); }

TEST(OwnerNonceTest, HasARandomPartWithoutANumberOrANonce) {
  for (const char* nonce : {"restart-0", ""}) {
    const std::string first = OwnerNonce(0, nonce);
    EXPECT_EQ(first.rfind(nonce, 0), 0u) << first;
    EXPECT_NE(first, OwnerNonce(0, nonce));
    EXPECT_TRUE(IsPlainNonce(first)) << first;
    EXPECT_TRUE(IsPlainNonce(OwnerNonce(0, std::string(100, 'a'))));
  }
}

}  // namespace
}  // namespace ddp::elastic
