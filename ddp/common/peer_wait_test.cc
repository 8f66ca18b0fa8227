#include "ddp/common/peer_wait.h"

#include <gtest/gtest.h>

namespace ddp {
namespace {

class Recorder final : public PeerWaitObserver {
 public:
  bool Begin() override {
    ++begun;
    return !ignores;
  }
  void End() override { ++ended; }

  bool ignores = false;
  int begun = 0;
  int ended = 0;
};

class PeerWaitTest : public ::testing::Test {
 protected:
  PeerWaitTest() { SetPeerWaitObserver(&recorder_); }
  ~PeerWaitTest() override { SetPeerWaitObserver(nullptr); }

  Recorder recorder_;
};

TEST_F(PeerWaitTest, WaitLastsAsLongAsItsScope) {
  {
    const PeerWaitScope wait;
    EXPECT_EQ(recorder_.begun, 1);
    EXPECT_EQ(recorder_.ended, 0);
  }
  EXPECT_EQ(recorder_.ended, 1);
}

TEST_F(PeerWaitTest, WaitThatTheObserverIgnoresHasNoEnd) {
  recorder_.ignores = true;
  { const PeerWaitScope wait; }
  EXPECT_EQ(recorder_.begun, 1);
  EXPECT_EQ(recorder_.ended, 0);
}

TEST_F(PeerWaitTest, ObserverThatIsRemovedWithinAWaitSeesItsEnd) {
  {
    const PeerWaitScope wait;
    SetPeerWaitObserver(nullptr);
    const PeerWaitScope unobserved;
  }
  EXPECT_EQ(recorder_.begun, 1);
  EXPECT_EQ(recorder_.ended, 1);
}

}  // namespace
}  // namespace ddp
