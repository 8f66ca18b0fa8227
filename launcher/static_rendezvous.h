#ifndef DDP_LAUNCHER_STATIC_RENDEZVOUS_H_
#define DDP_LAUNCHER_STATIC_RENDEZVOUS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "launcher/server_guard.h"
#include "store/redis_endpoint.h"
#include "store/tcp_store_server.h"

namespace ddp::launcher {

// How the agents of --node-rank, --master-addr and --master-port find each other without an
// endpoint: node 0 serves the workers' TCPStore at MASTER_ADDR:MASTER_PORT from the start, starts a
// private Redis beside it, and publishes there where that Redis is.
struct StaticRendezvousOptions {
  static constexpr int kDefaultMasterPort = 29500;

  int node_rank = 0;
  std::string master_addr = "127.0.0.1";  // a name or an address
  int master_port = kDefaultMasterPort;

  // A folder of ours for the Redis server of node 0 (PrivateRedisServer::Options::directory).
  std::string folder;

  // How long another node waits for node 0, and node 0 for its own name, master_addr.
  absl::Duration timeout = absl::Minutes(10);

  // How long what answers at MASTER_PORT has for the proof that it knows the password.
  absl::Duration proof_timeout = absl::Seconds(10);
};

// What came of it.
struct StaticMeeting {
  // Where the rendezvous is, with the password to be there.
  store::RedisEndpoint endpoint;

  // Of node 0 only: the password is the user's, not one that every visitor can read.
  bool has_users_password = false;

  // Of node 0 only. To be kept while the job lives; Hold() and Renew() the store for each new
  // generation, it goes on telling late nodes where the rendezvous is.
  std::unique_ptr<ServerGuard> server;
  std::unique_ptr<store::TcpStoreServer> worker_store;
};

// On node 0 starts the two servers, as soon as master_addr can be resolved, and returns; the others
// are served while `event_loop` runs. On other nodes asks node 0, waiting for it for at most
// `timeout`. `event_loop` is not owned and must outlive the meeting. Call it on the main thread
// (see PrivateRedisServer).
//
// The Redis server wants a password. Where DDP_REDIS_PASSWORD or DDP_REDIS_PASSWORD_FILE gives one,
// which all nodes must have then, it is that one. A node sends it to the Redis server that node 0
// names, and only after node 0 has proved that it knows it (launcher/address_proof.h) and that the
// server belongs to MASTER_ADDR: node 0 has the same --master-addr and --master-port, or
// MASTER_ADDR stands for the server's address. Without the variables the password is random, and
// node 0 tells it to every program that asks at MASTER_ADDR:MASTER_PORT.
//
// kInvalidArgument: the environment's credentials, or a wildcard as address. kFailedPrecondition:
// master_addr is no address of node 0's machine. kAlreadyExists: the port is taken.
// kUnauthenticated: what answers at MASTER_ADDR:MASTER_PORT does not prove that it knows this
// node's password, or names a server that is not MASTER_ADDR's; nothing was sent to that server.
// kDeadlineExceeded: node 0 or its name was not to be found. Else what PrivateRedisServer::Start
// says. All as one line that names flag, value and fix.
absl::StatusOr<StaticMeeting> MeetStatically(const StaticRendezvousOptions& options,
                                             EventLoop* event_loop);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_STATIC_RENDEZVOUS_H_
