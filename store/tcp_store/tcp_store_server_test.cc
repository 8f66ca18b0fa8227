#include "store/tcp_store/tcp_store_server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "store/tcp_store/tcp_store_client.h"
#include "store/tcp_store/tcp_store_protocol.h"
#include "testing/network/loopback_client.h"
#include "testing/network/loopback_socket.h"

namespace ddp::store {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);
constexpr int kLongMs = 60'000;

// A server with its event loop on a thread of its own.
class RunningServer {
 public:
  explicit RunningServer(const TcpStoreLimits& limits = {}, const std::string& address = "") {
    loop_ = *EventLoop::Create();
    server_ = *TcpStoreServer::Listen(loop_.get(), address, 0, limits);
    port_ = server_->port();
    wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    EXPECT_TRUE(loop_->Watch(wake_.get(), EPOLLIN, [this](uint32_t) { RunTask(); }).ok());
    thread_ = std::thread([this] { EXPECT_TRUE(loop_->Run().ok()); });
  }

  ~RunningServer() {
    Do([this] {
      server_.reset();
      loop_->Stop();
    });
    thread_.join();
  }

  // Runs `task` on the event loop's thread and returns when it is done.
  void Do(std::function<void()> task) {
    std::promise<void> done;
    task_ = [&] {
      task();
      done.set_value();
    };
    const uint64_t one = 1;
    EXPECT_EQ(write(wake_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
    done.get_future().wait();
  }

  TcpStoreServer& server() { return *server_; }
  int port() const { return port_; }

  std::unique_ptr<TcpStoreClient> Connect(const std::string& host = "127.0.0.1") const {
    auto client = TcpStoreClient::Connect(host, port_, kLong);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

 private:
  void RunTask() {
    uint64_t count = 0;
    EXPECT_EQ(read(wake_.get(), &count, sizeof(count)), static_cast<ssize_t>(sizeof(count)));
    std::exchange(task_, nullptr)();
  }

  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<TcpStoreServer> server_;
  int port_ = 0;
  UniqueFd wake_;
  std::function<void()> task_;
  std::thread thread_;
};

// A client that can send any bytes.
class RawClient {
 public:
  explicit RawClient(const RunningServer& server, bool greet = true) {
    fd_ = testing::DialLoopback(server.port());
    EXPECT_TRUE(fd_.valid());
    if (!greet) return;
    Send(TcpStoreGreeting(1));
    EXPECT_EQ(Receive(4).size(), 4u);
  }

  void Send(const std::string& bytes) {
    (void)!send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }

  // Sends `bytes` again and again until the server takes no more, or until `limit` bytes.
  void SendAll(const std::string& bytes, size_t limit) {
    size_t sent = 0;
    while (sent < limit) {
      const ssize_t count = send(fd_.get(), bytes.data(), std::min(bytes.size(), limit - sent),
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count <= 0) return;
      sent += static_cast<size_t>(count);
    }
  }

  // Returns `size` bytes, or fewer when the server has closed the connection.
  std::string Receive(size_t size) {
    std::string bytes(size, '\0');
    size_t received = 0;
    while (received < size) {
      pollfd entry{.fd = fd_.get(), .events = POLLIN, .revents = 0};
      if (poll(&entry, 1, kLongMs) != 1) {
        ADD_FAILURE() << "the server said nothing";
        break;
      }
      const ssize_t count = recv(fd_.get(), bytes.data() + received, size - received, 0);
      if (count <= 0) break;
      received += static_cast<size_t>(count);
    }
    bytes.resize(received);
    return bytes;
  }

  bool IsDropped() { return Receive(1).empty(); }
  bool HasSomething() const {
    pollfd entry{.fd = fd_.get(), .events = POLLIN, .revents = 0};
    return poll(&entry, 1, 0) != 0;
  }

 private:
  UniqueFd fd_;
};

std::string Request(TcpStoreQuery query, const std::vector<std::string>& texts) {
  std::string out;
  AppendQuery(out, query);
  for (const std::string& text : texts) AppendString(out, text);
  return out;
}

std::string Wait(const std::string& key) {
  std::string out;
  AppendQuery(out, TcpStoreQuery::kWait);
  AppendNumber(out, 1);
  AppendString(out, key);
  return out;
}

TEST(TcpStoreServerTest, TheOwnerAnswersQuestionsInEveryLifeOfTheStore) {
  RunningServer running;
  const auto early = running.Connect();
  running.Do([&] {
    running.server().AnswerTo("ask/", [](const std::string& question) { return question + "!"; });
  });
  EXPECT_EQ(*early->Get("ask/a", kLong), "a!");
  EXPECT_TRUE(early->Set("ask/b", "stored", kLong).ok());
  EXPECT_EQ(*early->Get("ask/b", kLong), "b!") << "no client answers in the owner's place";
  running.Do([&] { running.server().Hold(); });
  const auto late = running.Connect();
  EXPECT_EQ(*late->Get("ask/c", kLong), "c!");
  EXPECT_TRUE(absl::IsDeadlineExceeded(late->Get("other", absl::Milliseconds(20)).status()));
  running.Do([&] { running.server().Renew(); });
  EXPECT_EQ(*running.Connect()->Get("ask/d", kLong), "d!");
}

TEST(TcpStoreServerTest, ClientsReadWhatOthersSet) {
  RunningServer server;
  const auto one = server.Connect();
  const auto two = server.Connect();
  ASSERT_TRUE(one->Set("k", "v", kLong).ok());
  EXPECT_EQ(*two->Get("k", kLong), "v");
  const std::string large(300'000, 'x');
  ASSERT_TRUE(two->Set("", large, kLong).ok());
  EXPECT_EQ(*one->Get("", kLong), large);
}

TEST(TcpStoreServerTest, AWaitIsAnsweredWhenTheKeyComes) {
  RunningServer server;
  const auto one = server.Connect();
  auto got = std::async(std::launch::async, [&] { return one->Get("late", kLong); });
  ASSERT_TRUE(server.Connect()->Set("late", "v", kLong).ok());
  EXPECT_EQ(*got.get(), "v");
}

TEST(TcpStoreServerTest, GetHasADeadline) {
  RunningServer server;
  const auto client = server.Connect();
  const auto got = client->Get("never", absl::Milliseconds(20));
  EXPECT_TRUE(absl::IsDeadlineExceeded(got.status())) << got.status();
  EXPECT_NE(got.status().message().find("no key 'never'"), std::string::npos) << got.status();
}

TEST(TcpStoreServerTest, ListensOnAllAddressesOrOnOne) {
  {
    RunningServer server;
    EXPECT_TRUE(server.Connect("127.0.0.1")->Set("k", "v", kLong).ok());
    EXPECT_TRUE(server.Connect("127.0.0.2")->Set("k", "v", kLong).ok());
    EXPECT_TRUE(server.Connect("localhost")->Set("k", "v", kLong).ok());
  }
  RunningServer server({}, "127.0.0.3");
  EXPECT_TRUE(server.Connect("127.0.0.3")->Set("k", "v", kLong).ok());
  const auto elsewhere = TcpStoreClient::Connect("127.0.0.4", server.port(), absl::Milliseconds(1));
  EXPECT_TRUE(absl::IsUnavailable(elsewhere.status())) << elsewhere.status();
}

TEST(TcpStoreServerTest, WhatCannotBeListenedOnIsNamed) {
  RunningServer taken({}, "127.0.0.1");
  const auto loop = *EventLoop::Create();
  const auto status = [&](const std::string& address, int port) {
    return TcpStoreServer::Listen(loop.get(), address, port).status();
  };
  EXPECT_TRUE(absl::IsAlreadyExists(status("127.0.0.1", taken.port())));
  EXPECT_TRUE(absl::IsAlreadyExists(status("", taken.port()))) << status("", taken.port());
  EXPECT_NE(status("127.0.0.1", taken.port()).message().find(absl::StrCat(taken.port())),
            std::string::npos);
  EXPECT_TRUE(absl::IsFailedPrecondition(status("192.0.2.1", 0))) << "for documents only";
  EXPECT_TRUE(absl::IsInvalidArgument(status("localhost", 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(status("", 65536)));
  EXPECT_TRUE(absl::IsInvalidArgument(status("", -1)));
}

TEST(TcpStoreServerTest, ThePortCanBeUsedAgainAtOnce) {
  const auto loop = *EventLoop::Create();
  int port = 0;
  {
    RunningServer server({}, "127.0.0.1");
    port = server.port();
    EXPECT_TRUE(server.Connect()->Set("k", "v", kLong).ok());
  }
  EXPECT_TRUE(TcpStoreServer::Listen(loop.get(), "127.0.0.1", port).ok());
}

TEST(TcpStoreServerTest, RenewIsANewServerButForWhatIsPublished) {
  RunningServer server;
  RawClient waiter(server);
  waiter.Send(Wait("/k") + Wait("ours"));
  RawClient early(server);
  early.Send(Wait("ours"));
  server.Do([&] { server.server().Publish("ours", "v"); });
  EXPECT_EQ(early.Receive(1), std::string(1, kStopWaiting));
  ASSERT_TRUE(server.Connect()->Set("/old", "v", kLong).ok());
  server.Do([&] { server.server().Renew(); });
  EXPECT_TRUE(waiter.IsDropped());
  EXPECT_TRUE(early.IsDropped());
  const auto client = server.Connect();
  EXPECT_EQ(*client->Get("ours", kLong), "v");
  EXPECT_TRUE(absl::IsDeadlineExceeded(client->Get("/old", absl::Milliseconds(1)).status()));
}

TEST(TcpStoreServerTest, WhoWasThereBeforeHoldGoesOnUntilRenew) {
  RunningServer server;
  RawClient waiter(server);
  waiter.Send(Wait("/barrier"));
  const auto peer = server.Connect();
  ASSERT_TRUE(peer->Set("/old", "v", kLong).ok());
  server.Do([&] {
    server.server().Hold();
    server.server().Hold();
  });
  ASSERT_TRUE(peer->Set("/barrier", "all are here", kLong).ok());
  EXPECT_EQ(waiter.Receive(1), std::string(1, kStopWaiting));
  EXPECT_EQ(*peer->Get("/old", kLong), "v");
  server.Do([&] { server.server().Renew(); });
  EXPECT_TRUE(waiter.IsDropped());
  EXPECT_FALSE(peer->Get("/old", kLong).ok());
}

TEST(TcpStoreServerTest, WhoComesAfterHoldReadsOnlyWhatIsPublishedUntilRenew) {
  RunningServer server;
  server.Do([&] { server.server().Hold(); });
  RawClient next(server);
  next.Send(Wait("ours"));
  server.Do([&] { server.server().Publish("ours", "v"); });
  EXPECT_EQ(next.Receive(1), std::string(1, kStopWaiting));
  // The third request is behind the second, which must wait.
  std::string requests = Request(TcpStoreQuery::kGet, {"ours"});
  requests += Request(TcpStoreQuery::kSet, {"/address", "new"}) + Wait("/address");
  next.Send(requests);
  std::string answer;
  AppendString(answer, "v");
  EXPECT_EQ(next.Receive(answer.size()), answer);
  server.Do([] {});  // the server has read all requests
  EXPECT_FALSE(next.HasSomething());
  server.Do([&] { server.server().Renew(); });
  EXPECT_EQ(next.Receive(1), std::string(1, kStopWaiting));
  EXPECT_EQ(*server.Connect()->Get("/address", kLong), "new");
}

// A worker of the ending generation was just starting when its agent killed it.
TEST(TcpStoreServerTest, NothingIsAppliedOfWhoCameAfterHoldAndWentBeforeRenew) {
  RunningServer server;
  server.Do([&] { server.server().Hold(); });
  for (int i = 0; i < 20; ++i) {
    RawClient dying(server);
    dying.Send(Request(TcpStoreQuery::kSet, {"/address", "of a dead worker"}));
  }
  server.Do([&] { server.server().Renew(); });
  const auto client = server.Connect();
  EXPECT_TRUE(absl::IsDeadlineExceeded(client->Get("/address", absl::Milliseconds(1)).status()));
}

// The same case, but the server had not accepted the clients yet.
TEST(TcpStoreServerTest, NothingIsAppliedOfWhoWentWithoutBeingAccepted) {
  RunningServer server;
  const std::string waiting = TcpStoreGreeting(1) + Request(TcpStoreQuery::kSet, {"/live", "v"});
  std::unique_ptr<RawClient> living;
  server.Do([&] {
    server.server().Hold();
    for (int i = 0; i < 100; ++i) {
      RawClient dying(server, /*greet=*/false);
      dying.Send(TcpStoreGreeting(1) + Request(TcpStoreQuery::kSet, {"/address", "of the dead"}));
    }
    living = std::make_unique<RawClient>(server, /*greet=*/false);
    living->Send(waiting);
    server.server().Renew();
  });
  const auto client = server.Connect();
  EXPECT_EQ(*client->Get("/live", kLong), "v");
  EXPECT_TRUE(absl::IsDeadlineExceeded(client->Get("/address", absl::Milliseconds(1)).status()));
}

TEST(TcpStoreServerTest, ABadClientIsDroppedAndHarmsNobody) {
  RunningServer server;
  const auto good = server.Connect();
  ASSERT_TRUE(good->Set("k", "v", kLong).ok());
  for (const std::string& bad :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(1, '\7'), std::string(100, '\xff'),
        TcpStoreGreeting(1) + std::string(1, '\x30'),
        TcpStoreGreeting(1) + std::string("\1\xff\xff\xff\xff\xff\xff\xff\xff", 9)}) {
    RawClient client(server, /*greet=*/false);
    client.Send(bad);
    const std::string all = client.Receive(5);
    EXPECT_LE(all.size(), 4u) << "closed, after the greeting's answer at most";
  }
  EXPECT_EQ(*good->Get("k", kLong), "v");
}

TEST(TcpStoreServerTest, RandomBytesHarmNobody) {
  RunningServer server;
  const auto good = server.Connect();
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    RawClient client(server);
    std::string noise;
    for (int i = 0; i < 300; ++i) noise.push_back(static_cast<char>(random() % 19));
    client.Send(noise);
  }
  ASSERT_TRUE(good->Set("k", "v", kLong).ok());
  EXPECT_EQ(*good->Get("k", kLong), "v");
}

TEST(TcpStoreServerTest, AClientThatReadsNothingHoldsUpNobody) {
  RunningServer server;
  const auto good = server.Connect();
  ASSERT_TRUE(good->Set("large", std::string(1 << 20, 'x'), kLong).ok());
  RawClient deaf(server);
  std::string many;
  for (int i = 0; i < 1000; ++i) many += Request(TcpStoreQuery::kGet, {"large"});
  deaf.SendAll(many, 1 << 20);
  RawClient half(server);
  half.Send(Request(TcpStoreQuery::kSet, {"k", "value"}).substr(0, 15));
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(good->Set("k", absl::StrCat(i), kLong).ok());
  EXPECT_EQ(*good->Get("k", kLong), "99");
  // The client still gets all replies when it reads again.
  const std::string reply = deaf.Receive(5 * (8 + (1 << 20)));
  EXPECT_EQ(reply.size(), 5u * (8 + (1 << 20)));
}

TEST(TcpStoreServerTest, WhoMakesTheServerHoldTooMuchIsDropped) {
  // An unfinished value may take up to twice its size, which must be within the limit.
  const size_t value_bytes = 7 << 20;
  RunningServer server({.max_value_bytes = value_bytes, .max_buffered_bytes = 16 << 20});
  const auto good = server.Connect();
  ASSERT_TRUE(good->Set("large", std::string(value_bytes, 'x'), kLong).ok());
  std::vector<std::unique_ptr<RawClient>> deaf;
  for (int i = 0; i < 12; ++i) {
    deaf.push_back(std::make_unique<RawClient>(server));
    deaf.back()->Send(Request(TcpStoreQuery::kGet, {"large"}));
    ASSERT_TRUE(good->Set("k", "v", kLong).ok()) << "served on";
  }
  int dropped = 0;
  for (const auto& client : deaf) dropped += client->Receive(8 + value_bytes).size() < value_bytes;
  EXPECT_GE(dropped, 4);
  EXPECT_LT(dropped, 12);
}

TEST(TcpStoreServerTest, ManyClientsWaitForOneKey) {
  // A client takes two descriptors, since both ends are ours. The server takes half of those that
  // the process may have.
  constexpr int kClients = 400;
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 4096);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  RunningServer server;
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.push_back(std::make_unique<RawClient>(server));
    clients.back()->Send(Wait("k"));
  }
  ASSERT_TRUE(server.Connect()->Set("k", "v", kLong).ok());
  for (const auto& client : clients) EXPECT_EQ(client->Receive(1), std::string(1, kStopWaiting));
}

TEST(TcpStoreServerTest, SilentStrangersMakeRoomForClients) {
  RunningServer server({.max_clients = 4});
  std::vector<std::unique_ptr<RawClient>> strangers;
  for (int i = 0; i < 10; ++i) strangers.push_back(std::make_unique<RawClient>(server, false));
  std::vector<std::unique_ptr<TcpStoreClient>> clients;
  for (int i = 0; i < 4; ++i) clients.push_back(server.Connect());
  for (const auto& client : clients) EXPECT_TRUE(client->Set("k", "v", kLong).ok());
  for (const auto& stranger : strangers) EXPECT_TRUE(stranger->IsDropped());
  // The server is full of clients: one more is refused, and no client is dropped for it.
  const auto more = TcpStoreClient::Connect("127.0.0.1", server.port(), absl::Milliseconds(1));
  EXPECT_TRUE(absl::IsUnavailable(more.status())) << more.status();
  for (const auto& client : clients) EXPECT_TRUE(client->Set("k", "v", kLong).ok());
}

TEST(TcpStoreClientTest, WaitsForTheServerToStart) {
  // A bound port that no other program gets. No process listens there until the test does.
  const testing::LoopbackSocket listener = testing::BindLoopback();
  auto client = std::async(std::launch::async, [&] {
    return TcpStoreClient::Connect("127.0.0.1", listener.port, kLong);
  });
  ASSERT_EQ(listen(listener.fd.get(), 1), 0);
  const UniqueFd peer(accept(listener.fd.get(), nullptr, nullptr));
  std::string greeting(TcpStoreGreeting(0).size(), '\0');
  ASSERT_EQ(recv(peer.get(), greeting.data(), greeting.size(), MSG_WAITALL),
            static_cast<ssize_t>(greeting.size()));
  ASSERT_EQ(send(peer.get(), greeting.data() + greeting.size() - 4, 4, MSG_NOSIGNAL), 4);
  EXPECT_TRUE(client.get().ok());
}

TEST(TcpStoreClientTest, SaysWhyThereIsNoServer) {
  const auto name = TcpStoreClient::Connect("no-such-host.invalid", 1, absl::Milliseconds(1));
  EXPECT_TRUE(absl::IsUnavailable(name.status()));
  EXPECT_NE(name.status().message().find("host name"), std::string::npos) << name.status();
  const testing::LoopbackSocket deaf = testing::BindLoopback();
  const auto refused = TcpStoreClient::Connect("127.0.0.1", deaf.port, absl::Milliseconds(1));
  EXPECT_NE(refused.status().message().find("refused"), std::string::npos) << refused.status();
}

}  // namespace
}  // namespace ddp::store
