#include "elastic/checkpoint/save_load/save_writer.h"

#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using Task = std::shared_ptr<const SaveWriter::Task>;

TEST(SaveWriterTest, SavesRunInOrderOnOneThreadWhileTheCallerGoesOn) {
  SaveWriter writer;
  std::promise<void> go;
  std::vector<std::string> order;
  const Task first = writer.Add(
      [&] {
        go.get_future().wait();
        EXPECT_TRUE(writer.IsWriterThread());
        order.push_back("first");
        return "1";
      },
      nullptr);
  const Task second = writer.Add(
      [&]() -> absl::StatusOr<std::string> {
        order.push_back("second");
        return absl::UnavailableError("full");
      },
      nullptr);
  EXPECT_EQ(first->Result(), nullptr);
  EXPECT_FALSE(writer.IsIdle());
  EXPECT_FALSE(writer.IsWriterThread());
  go.set_value();
  EXPECT_EQ(second->Await(nullptr).status(), absl::UnavailableError("full"));
  EXPECT_EQ(**first->Result(), "1");
  const Task third = writer.RunHere(
      [&] {
        EXPECT_FALSE(writer.IsWriterThread());
        order.push_back("third");
        return "3";
      },
      nullptr);
  EXPECT_EQ(**third->Result(), "3");
  EXPECT_THAT(order, ElementsAre("first", "second", "third"));
  EXPECT_TRUE(writer.IsIdle());
}

TEST(SaveWriterTest, ProgressIsToldOnTheThreadThatWaits) {
  SaveWriter writer;
  std::promise<void> told;
  std::promise<void> waits;
  const Task save = writer.Add(
      [&] {
        waits.get_future().wait();
        writer.Progressed();
        told.get_future().wait();  // the save ends only after its progress was told
        return "";
      },
      nullptr);
  const std::thread::id here = std::this_thread::get_id();
  bool once = false;
  waits.set_value();
  writer.Drain([&] {
    EXPECT_EQ(std::this_thread::get_id(), here);
    if (!once) told.set_value();
    once = true;
  });
  EXPECT_TRUE(once);
}

TEST(SaveWriterTest, TheDestructorWaitsAndAHandleOutlivesIt) {
  Task save;
  auto freed = std::make_shared<int>();
  const std::weak_ptr<int> watch = freed;
  {
    SaveWriter writer;
    std::promise<void> go;
    save = writer.Add(
        [&go, freed = std::move(freed)] {
          go.get_future().wait();
          return "saved";
        },
        nullptr);
    go.set_value();
  }
  EXPECT_EQ(**save->Result(), "saved");
  EXPECT_TRUE(watch.expired()) << "the memory of a save that has ended is in use";
}

TEST(SaveWriterTest, AnExceptionIsTheResult) {
  SaveWriter writer;
  const Task save = writer.Add(
      []() -> absl::StatusOr<std::string> { throw std::runtime_error("broken"); }, nullptr);
  EXPECT_EQ(save->Await(nullptr).status(), absl::InternalError("broken"));
}

}  // namespace
}  // namespace ddp::elastic
