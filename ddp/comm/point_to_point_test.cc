#include "ddp/comm/point_to_point.h"

#include <chrono>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class DoneWork : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return true; }
};

// A work that the test completes.
class FutureWork : public c10d::Work {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  const WorkFuture future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
};

// A backend whose works have futures.
class Promises : public c10d::Backend {
 public:
  Promises() : Backend(0, 2) {}
  WorkPtr send(std::vector<at::Tensor>&, int, int) override { return New(); }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int, int) override {
    tensors[0].zero_();
    return New();
  }
  void Complete(size_t work) { works[work]->future->markCompleted(std::vector<at::Tensor>()); }

  std::vector<c10::intrusive_ptr<FutureWork>> works;

 private:
  WorkPtr New() { return works.emplace_back(c10::make_intrusive<FutureWork>()); }
};

// A backend whose messages to itself are kept by tag, as a mailbox. A receive finds the message
// with its tag, or leaves its tensor as it is.
class Mailbox : public c10d::Backend {
 public:
  Mailbox() : Backend(0, 2) {}
  WorkPtr send(std::vector<at::Tensor>& tensors, int, int tag) override {
    tags.push_back(tag);
    sent_[tag] = tensors[0].clone();
    return c10::make_intrusive<DoneWork>();
  }
  WorkPtr recv(std::vector<at::Tensor>& tensors, int, int tag) override {
    if (sent_.count(tag) > 0) tensors[0].copy_(sent_[tag]);
    return c10::make_intrusive<DoneWork>();
  }

  std::vector<int> tags;

 private:
  std::map<int, at::Tensor> sent_;
};

std::string ErrorOf(const PointToPoint::Message& message) {
  try {
    message.future->waitAndThrow();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

class PointToPointTest : public ::testing::Test {
 protected:
  const c10::intrusive_ptr<Mailbox> mailbox_ = c10::make_intrusive<Mailbox>();
  PointToPoint sender_{mailbox_, /*matches_tags=*/true};
  PointToPoint receiver_{mailbox_, /*matches_tags=*/true};
};

TEST_F(PointToPointTest, AMessageHasAHeaderAndABody) {
  EXPECT_EQ(ErrorOf(sender_.Send(at::arange(4), 1, 7)), "");
  EXPECT_THAT(mailbox_->tags, SizeIs(2));
  const at::Tensor received = at::zeros({4}, at::kLong);
  EXPECT_EQ(ErrorOf(receiver_.Receive(received, 1, 7)), "");
  EXPECT_TRUE(received.equal(at::arange(4)));
}

// The header arrives; the body has another tag, so it never reaches a tensor of another size.
TEST_F(PointToPointTest, AnotherSizeOrTypeIsNamed) {
  EXPECT_EQ(ErrorOf(sender_.Send(at::ones({4}), 1, 0)), "");
  const at::Tensor longer = at::zeros({5});
  EXPECT_THAT(ErrorOf(receiver_.Receive(longer, 1, 0)),
              HasSubstr("rank 1 sends 4 elements of Float, and this rank receives 5 elements of "
                        "Float"));
  EXPECT_EQ(longer.sum().item<float>(), 0);
  EXPECT_EQ(ErrorOf(sender_.Send(at::ones({1}), 1, 0)), "");
  EXPECT_THAT(ErrorOf(receiver_.Receive(at::zeros({1}, at::kDouble), 1, 0)),
              HasSubstr("1 element of Float, and this rank receives 1 element of Double"));
}

// Messages with one tag are numbered, and messages with other tags are numbered on their own.
TEST_F(PointToPointTest, MessagesArriveInOrder) {
  for (const float value : {1.0F, 2.0F}) {
    EXPECT_EQ(ErrorOf(sender_.Send(at::ones({2}) * value, 1, 0)), "");
  }
  EXPECT_EQ(ErrorOf(sender_.Send(at::ones({2}) * 9, 1, 5)), "");
  const auto receive = [&](int tag) {
    const at::Tensor tensor = at::zeros({2});
    EXPECT_EQ(ErrorOf(receiver_.Receive(tensor, 1, tag)), "");
    return tensor[0].item<float>();
  };
  EXPECT_EQ(receive(5), 9);
  EXPECT_EQ(receive(0), 1);
  EXPECT_EQ(receive(0), 2);
}

TEST_F(PointToPointTest, AnEmptyTensorHasAHeaderOnly) {
  EXPECT_EQ(ErrorOf(sender_.Send(at::zeros({0}), 1, 0)), "");
  EXPECT_THAT(mailbox_->tags, SizeIs(1));
}

// No thread waits: the test's own thread completes the message.
TEST_F(PointToPointTest, AMessageIsCompleteWithTheFuturesOfItsParts) {
  const auto promises = c10::make_intrusive<Promises>();
  PointToPoint messages(promises, /*matches_tags=*/true);
  const at::Tensor tensor = at::ones({4});
  const PointToPoint::Message sent = messages.Send(tensor, 1, 0);
  promises->Complete(1);
  EXPECT_FALSE(sent.future->completed());
  promises->Complete(0);
  ASSERT_TRUE(sent.future->completed());
  EXPECT_TRUE(sent.future->value().toTensorVector().at(0).is_same(tensor));
  const PointToPoint::Message received = messages.Receive(tensor, 1, 0);
  promises->Complete(2);  // with a header of zeros
  ASSERT_TRUE(received.future->completed());
  EXPECT_THAT(ErrorOf(received), HasSubstr("and this rank receives 4 elements of Float"));
}

TEST_F(PointToPointTest, ABackendWithoutTagsGetsTheTensorAlone) {
  PointToPoint plain(mailbox_, /*matches_tags=*/false);
  EXPECT_EQ(ErrorOf(plain.Send(at::ones({3}), 1, 4)), "");
  EXPECT_THAT(mailbox_->tags, ElementsAre(4));
  EXPECT_EQ(ErrorOf(plain.Send(at::zeros({0}), 1, 4)), "");
  EXPECT_THAT(mailbox_->tags, SizeIs(1)) << "nothing to send";
}

}  // namespace
}  // namespace ddp::internal
