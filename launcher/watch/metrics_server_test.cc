#include "launcher/watch/metrics_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/network/loopback_client.h"

namespace ddp::launcher {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

class MetricsServerTest : public ::testing::Test {
 protected:
  MetricsServerTest() : loop_(*EventLoop::Create()), done_(::eventfd(0, EFD_CLOEXEC)) {}

  void Listen(const MetricsServer::Options& options) {
    absl::StatusOr<std::unique_ptr<MetricsServer>> server =
        MetricsServer::Listen(loop_.get(), options, [this] {
          ++snapshots_;
          elastic::JobStatus status;
          status.generation = snapshots_;
          return status;
        });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  // Runs the server for as long as `client` takes.
  void Serve(const std::function<void()>& client) {
    ASSERT_TRUE(loop_->Watch(done_.get(), EPOLLIN, [this](uint32_t) { loop_->Stop(); }).ok());
    std::thread thread([&] {
      client();
      const uint64_t one = 1;
      EXPECT_EQ(::write(done_.get(), &one, sizeof(one)), 8);
    });
    EXPECT_TRUE(loop_->Run().ok());
    thread.join();
    loop_->Unwatch(done_.get());
  }

  std::string Ask(const std::string& request) {
    const UniqueFd fd = testing::DialLoopback(server_->port());
    testing::SendText(fd, request);
    return testing::ReceiveText(fd);
  }

  const std::unique_ptr<EventLoop> loop_;
  const UniqueFd done_;
  uint64_t snapshots_ = 0;
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsServerTest, AnswersOnIpv6AndOnIpv4) {
  if (!testing::HasLoopback6()) GTEST_SKIP() << "this machine has no IPv6";
  Listen({});
  std::vector<std::string> answers;
  Serve([&] {
    for (const auto dial : {testing::DialLoopback, testing::DialLoopback6}) {
      const UniqueFd fd = dial(server_->port());
      ASSERT_TRUE(fd.valid());
      testing::SendText(fd, "GET /metrics HTTP/1.1\r\n\r\n");
      answers.push_back(testing::ReceiveText(fd));
    }
  });
  ASSERT_EQ(answers.size(), 2U);
  for (const std::string& answer : answers) EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(MetricsServerTest, AnswersAsOftenAsItIsAsked) {
  Listen({});
  EXPECT_GT(server_->port(), 0);
  std::vector<std::string> answers;
  Serve([&] {
    for (int i = 0; i < 100; ++i) {
      answers.push_back(Ask("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"));
    }
  });
  ASSERT_EQ(answers.size(), 100u);
  for (size_t i = 0; i < answers.size(); ++i) {
    EXPECT_THAT(answers[i],
                StartsWith("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"));
    EXPECT_THAT(answers[i], HasSubstr(absl::StrCat("\nddp_generation ", i + 1, "\n")));
    const size_t body = answers[i].find("\r\n\r\n") + 4;
    EXPECT_THAT(answers[i],
                HasSubstr(absl::StrCat("Content-Length: ", answers[i].size() - body, "\r\n")));
  }
}

TEST_F(MetricsServerTest, TakesARequestThatComesInPieces) {
  Listen({});
  std::string answer;
  Serve([&] {
    const UniqueFd fd = testing::DialLoopback(server_->port());
    for (const char byte : std::string("GET /metrics?name=x HTTP/1.0\r\n\r\n")) {
      testing::SendText(fd, std::string(1, byte));
    }
    answer = testing::ReceiveText(fd);
  });
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(MetricsServerTest, RefusesAllElse) {
  Listen({});
  Serve([&] {
    EXPECT_THAT(Ask("GET / HTTP/1.1\r\n\r\n"), EndsWith("\r\n\r\nthe metrics are at /metrics\n"));
    EXPECT_THAT(Ask("POST /metrics HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 405 "));
    EXPECT_THAT(Ask("nonsense\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
    EXPECT_THAT(Ask("\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
    EXPECT_THAT(Ask("GET /metrics\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
    EXPECT_THAT(Ask(std::string("\0\xff GET \0\n\n", 11)), StartsWith("HTTP/1.1 "));
  });
  EXPECT_EQ(snapshots_, 0u);
}

TEST_F(MetricsServerTest, ReadsNoMoreThanARequestMayHave) {
  Listen({});
  std::string answer;
  Serve([&] {
    const UniqueFd fd = testing::DialLoopback(server_->port());
    // The last byte exceeds the limit, and no byte is left unread.
    testing::SendText(fd, std::string(8193, 'x'));
    answer = testing::ReceiveText(fd);
  });
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 431 "));
}

TEST_F(MetricsServerTest, ClosesAConnectionThatSaysNothing) {
  Listen({.connection_timeout = absl::Milliseconds(1)});
  std::string answer = "none";
  Serve([&] {
    const UniqueFd fd = testing::DialLoopback(server_->port());
    answer = testing::ReceiveText(fd);
  });
  EXPECT_THAT(answer, IsEmpty());
}

TEST_F(MetricsServerTest, ClosesConnectionsBeyondItsBound) {
  Listen({.connection_timeout = absl::Hours(1), .connections_max = 2});
  Serve([&] {
    const UniqueFd first = testing::DialLoopback(server_->port());
    const UniqueFd second = testing::DialLoopback(server_->port());
    const UniqueFd third = testing::DialLoopback(server_->port());
    EXPECT_THAT(testing::ReceiveText(third), IsEmpty());
    testing::SendText(first, "GET /metrics HTTP/1.1\r\n\r\n");
    EXPECT_THAT(testing::ReceiveText(first), StartsWith("HTTP/1.1 200 OK\r\n"));
    // A connection is free again. `second` is still open; the server's end closes it.
    EXPECT_THAT(Ask("GET /metrics HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
  });
}

TEST_F(MetricsServerTest, NamesThePortThatIsTaken) {
  Listen({});
  const absl::Status status =
      MetricsServer::Listen(loop_.get(), {.port = server_->port()}, nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              StartsWith(absl::StrCat("--metrics-port: cannot listen on port ", server_->port(),
                                      ": Address already in use")));
}

TEST_F(MetricsServerTest, LeavesItsPortFree) {
  Listen({});
  const int port = server_->port();
  Serve([&] { Ask("GET /metrics HTTP/1.1\r\n\r\n"); });
  server_.reset();
  Listen({.port = port});
  EXPECT_EQ(server_->port(), port);
}

}  // namespace
}  // namespace ddp::launcher
