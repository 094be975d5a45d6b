/*
 * Matches transfers. Nothing here blocks: an operation posts its transfers, and the last rank to
 * come moves the bytes and finishes the operations of all ranks.
 */
#include <string.h>

#include <algorithm>
#include <utility>

#include "inside.h"
#include "nccl_meeting.h"

namespace emulation {

namespace {

bool is_collective(const transfer &what) {
  return what.kind != transfer::send && what.kind != transfer::receive;
}

bool is_same_call(const transfer &a, const transfer &b) {
  return a.kind == b.kind && a.count == b.count && a.type == b.type &&
         (a.kind == transfer::all_gather || a.reduction == b.reduction);
}

/* Counts one transfer as ended; the last one ends the operation. */
void end_transfer(clique &ranks, const std::shared_ptr<begun> &by) {
  if (--by->transfers)
    return;
  ranks.waiting.erase(std::find(ranks.waiting.begin(), ranks.waiting.end(), by));
  finish_operation(by->self);
}

/* Matches sends with their receives; unequal numbers of bytes are an error of both ranks. */
void match_transfers(clique &ranks, std::pair<int, int> pair) {
  std::deque<posted> &sends = ranks.sends[pair], &receives = ranks.receives[pair];
  while (!ranks.failed && !sends.empty() && !receives.empty()) {
    posted send = sends.front(), receive = receives.front();
    size_t bytes = send.what.count * size_of(send.what.type);
    if (bytes != receive.what.count * size_of(receive.what.type)) {
      fail_ranks(ranks, ranks.ranks[static_cast<size_t>(pair.first)].lock().get(),
                 ncclInvalidArgument);
      if (comm_ptr receiver = ranks.ranks[static_cast<size_t>(pair.second)].lock())
        receiver->error = ncclInvalidArgument;
      return;
    }
    if (bytes && !is_left_out(bytes))
      memmove(receive.what.to, send.what.from, bytes);
    sends.pop_front();
    receives.pop_front();
    send.by->awaited[static_cast<size_t>(pair.second)]--;
    receive.by->awaited[static_cast<size_t>(pair.first)]--;
    end_transfer(ranks, send.by);
    end_transfer(ranks, receive.by);
  }
}

/* Computes the results in separate memory: the output of a rank may be the input of any rank. */
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

void finish_collective(clique &ranks, long number) {
  std::vector<posted> &present = ranks.collectives[number];
  if (present.size() < ranks.ranks.size())
    return;
  std::vector<posted> all = std::move(present);
  ranks.collectives.erase(number);
  for (const posted &one : all)
    if (!is_same_call(one.what, all.front().what))
      return fail_ranks(ranks, nullptr, ncclInvalidArgument);
  run_collective(all);
  for (const posted &one : all) {
    for (int &awaited : one.by->awaited)
      awaited--;
    end_transfer(ranks, one.by);
  }
}

void post_transfer(ncclComm &comm, const transfer &what, const std::shared_ptr<begun> &by) {
  clique &ranks = *comm.ranks;
  posted mine{what, comm.rank, by};
  if (is_collective(what)) {
    for (int &awaited : by->awaited)
      awaited++;
    long number = comm.collectives++;
    ranks.collectives[number].push_back(mine);
    return finish_collective(ranks, number);
  }
  bool sends = what.kind == transfer::send;
  std::pair<int, int> pair(sends ? comm.rank : what.peer, sends ? what.peer : comm.rank);
  by->awaited[static_cast<size_t>(what.peer)]++;
  (sends ? ranks.sends : ranks.receives)[pair].push_back(mine);
  match_transfers(ranks, pair);
}

bool start(ncclComm &comm, const std::vector<transfer> &transfers, const operation_ptr &self) {
  lock held(guard());
  count(counted::groups);
  clique &ranks = *comm.ranks;
  comm.queued.erase(std::find(comm.queued.begin(), comm.queued.end(), self));
  if (comm.aborted)
    return true;
  if (comm.breaks)
    fail_ranks(ranks, nullptr, ncclRemoteError);
  /* The count starts one too high: the operation must not end before all transfers are posted. */
  auto by = std::make_shared<begun>(
      begun{self, &comm, transfers.size() + 1, std::vector<int>(ranks.ranks.size())});
  ranks.waiting.push_back(by);
  for (size_t i = 0; i < transfers.size() && !ranks.failed; i++)
    post_transfer(comm, transfers[i], by);
  if (!ranks.failed)
    end_transfer(ranks, by);
  return false;
}

/* Returns the operations that the awaited ranks have not begun yet. */
std::vector<operation_ptr> list_awaited(const clique &ranks, const operation &self) {
  std::vector<operation_ptr> found;
  for (const std::shared_ptr<begun> &by : ranks.waiting)
    for (size_t rank = 0; by->self.get() == &self && rank < ranks.ranks.size(); rank++)
      if (comm_ptr comm = ranks.ranks[rank].lock(); comm && by->awaited[rank])
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
          [comm](const operation &self) { return list_awaited(*comm->ranks, self); }, comm.get()};
}

/* Without a culprit all ranks get `code`. */
void fail_ranks(clique &ranks, ncclComm *culprit, ncclResult_t code) {
  ranks.failed = true;
  for (const std::weak_ptr<ncclComm> &rank : ranks.ranks)
    if (comm_ptr comm = rank.lock(); comm && !comm->error)
      comm->error = !culprit || comm.get() == culprit ? code : ncclRemoteError;
  ranks.sends.clear();
  ranks.receives.clear();
  ranks.collectives.clear();
  ranks.divisions.clear();
  wake_others(); /* threads that wait for ranks, not for an operation */
}

void abort_rank(ncclComm &comm) {
  clique &ranks = *comm.ranks;
  comm.aborted = true;
  fail_ranks(ranks, nullptr, ncclRemoteError);
  for (const std::shared_ptr<begun> &by : std::exchange(ranks.waiting, {}))
    if (by->comm == &comm)
      finish_operation(by->self);
    else
      ranks.waiting.push_back(by);
}

} // namespace emulation
