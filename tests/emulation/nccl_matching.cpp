/*
 * Matches transfers. No function in this file blocks. An operation posts its transfers, and the
 * last rank to arrive moves the bytes and finishes the operations of all ranks.
 */
#include <string.h>

#include <algorithm>
#include <utility>

#include "inside.h"
#include "nccl_matching.h"

namespace emulation {

namespace {

bool is_collective(const transfer &what) {
  return what.kind != transfer::send && what.kind != transfer::receive;
}

bool is_same_call(const transfer &a, const transfer &b) {
  return a.kind == b.kind && a.count == b.count && a.type == b.type &&
         (a.kind == transfer::all_gather || a.reduction == b.reduction);
}

/* Counts one transfer as ended. The last transfer ends the operation. */
void end_transfer(shared_state &shared, const std::shared_ptr<begun> &by) {
  if (--by->transfers)
    return;
  shared.waiting.erase(std::find(shared.waiting.begin(), shared.waiting.end(), by));
  finish_operation(by->self);
}

/* Matches sends with their receives. If their numbers of bytes differ, both ranks get an error. */
void match_transfers(shared_state &shared, std::pair<int, int> pair) {
  std::deque<posted> &sends = shared.sends[pair], &receives = shared.receives[pair];
  while (!shared.failed && !sends.empty() && !receives.empty()) {
    posted send = sends.front(), receive = receives.front();
    size_t bytes = send.what.count * size_of(send.what.type);
    if (bytes != receive.what.count * size_of(receive.what.type)) {
      fail_ranks(shared, shared.ranks[static_cast<size_t>(pair.first)].lock().get(),
                 ncclInvalidArgument);
      if (comm_ptr receiver = shared.ranks[static_cast<size_t>(pair.second)].lock())
        receiver->error = ncclInvalidArgument;
      return;
    }
    if (bytes && !is_left_out(bytes))
      memmove(receive.what.to, send.what.from, bytes);
    sends.pop_front();
    receives.pop_front();
    send.by->awaited[static_cast<size_t>(pair.second)]--;
    receive.by->awaited[static_cast<size_t>(pair.first)]--;
    end_transfer(shared, send.by);
    end_transfer(shared, receive.by);
  }
}

/* Computes the results in separate memory, because the output of one rank may be the input of
 * another rank. */
void run_collective(const std::vector<posted> &all) {
  const transfer &any = all.front().what;
  size_t bytes = any.count * size_of(any.type), ranks = all.size();
  std::vector<const void *> from(ranks);
  for (const posted &one : all)
    from[static_cast<size_t>(one.rank)] = one.what.from;
  size_t total = any.kind == transfer::all_reduce ? any.count : any.count * ranks;
  std::vector<char> result(total * size_of(any.type));
  if (any.kind == transfer::all_gather)
    for (size_t i = 0; i < ranks && bytes; i++)
      memcpy(&result[i * bytes], from[i], bytes);
  else
    reduce(result.data(), from, total, any.type, any.reduction);
  for (const posted &one : all) {
    bool part = any.kind == transfer::reduce_scatter;
    if (bytes)
      memcpy(one.what.to, &result[part ? static_cast<size_t>(one.rank) * bytes : 0],
             part ? bytes : result.size());
  }
}

void finish_collective(shared_state &shared, long number) {
  std::vector<posted> &present = shared.collectives[number];
  if (present.size() < shared.ranks.size())
    return;
  std::vector<posted> all = std::move(present);
  shared.collectives.erase(number);
  for (const posted &one : all)
    if (!is_same_call(one.what, all.front().what))
      return fail_ranks(shared, nullptr, ncclInvalidArgument);
  run_collective(all);
  for (const posted &one : all) {
    for (int &awaited : one.by->awaited)
      awaited--;
    end_transfer(shared, one.by);
  }
}

void post_transfer(ncclComm &comm, const transfer &what, const std::shared_ptr<begun> &by) {
  shared_state &shared = *comm.shared;
  posted mine{what, comm.rank, by};
  if (is_collective(what)) {
    for (int &awaited : by->awaited)
      awaited++;
    long number = comm.collectives++;
    shared.collectives[number].push_back(mine);
    return finish_collective(shared, number);
  }
  bool sends = what.kind == transfer::send;
  std::pair<int, int> pair(sends ? comm.rank : what.peer, sends ? what.peer : comm.rank);
  by->awaited[static_cast<size_t>(what.peer)]++;
  (sends ? shared.sends : shared.receives)[pair].push_back(mine);
  match_transfers(shared, pair);
}

bool start(ncclComm &comm, const std::vector<transfer> &transfers, const operation_ptr &self) {
  lock held(guard());
  count(counted::groups);
  shared_state &shared = *comm.shared;
  comm.queued.erase(std::find(comm.queued.begin(), comm.queued.end(), self));
  if (comm.aborted)
    return true;
  if (comm.breaks)
    fail_ranks(shared, nullptr, ncclRemoteError);
  /* The count starts one too high, because the operation must not end before all transfers are
   * posted. */
  auto by = std::make_shared<begun>(
      begun{self, &comm, transfers.size() + 1, std::vector<int>(shared.ranks.size())});
  shared.waiting.push_back(by);
  for (size_t i = 0; i < transfers.size() && !shared.failed; i++)
    post_transfer(comm, transfers[i], by);
  if (!shared.failed)
    end_transfer(shared, by);
  return false;
}

/* Returns the operations of other ranks that `self` waits for and that have not begun yet. */
std::vector<operation_ptr> list_awaited(const shared_state &shared, const operation &self) {
  std::vector<operation_ptr> found;
  for (const std::shared_ptr<begun> &by : shared.waiting)
    for (size_t rank = 0; by->self.get() == &self && rank < shared.ranks.size(); rank++)
      if (comm_ptr comm = shared.ranks[rank].lock(); comm && by->awaited[rank])
        found.insert(found.end(), comm->queued.begin(), comm->queued.end());
  return found;
}

} // namespace

work nccl_work(const comm_ptr &comm, std::vector<transfer> transfers) {
  return {[comm, transfers = std::move(transfers)](const operation_ptr &self) {
            return start(*comm, transfers, self);
          },
          [comm](const operation_ptr &self) {
            comm->queued.push_back(self);
            wake_others(); /* a rank that waits for the operation can now run it */
          },
          [comm](const operation &self) { return list_awaited(*comm->shared, self); }, comm.get()};
}

/* If `culprit` is NULL, all ranks get `code`. */
void fail_ranks(shared_state &shared, ncclComm *culprit, ncclResult_t code) {
  shared.failed = true;
  for (const std::weak_ptr<ncclComm> &rank : shared.ranks)
    if (comm_ptr comm = rank.lock(); comm && !comm->error)
      comm->error = !culprit || comm.get() == culprit ? code : ncclRemoteError;
  shared.sends.clear();
  shared.receives.clear();
  shared.collectives.clear();
  shared.divisions.clear();
  wake_others(); /* threads that wait for ranks, not for an operation */
}

void abort_rank(ncclComm &comm) {
  shared_state &shared = *comm.shared;
  comm.aborted = true;
  fail_ranks(shared, nullptr, ncclRemoteError);
  for (const std::shared_ptr<begun> &by : std::exchange(shared.waiting, {}))
    if (by->comm == &comm)
      finish_operation(by->self);
    else
      shared.waiting.push_back(by);
}

} // namespace emulation
