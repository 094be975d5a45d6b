/* The findings, from facts to what is wrong, in words. Knows neither MPI nor the machine. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "tools/doctor/judge.h"

/* --- Findings ----------------------------------------------------------------------------------*/

struct doctor_finding *doctor_add(struct doctor_diagnosis *diagnosis, enum doctor_kind kind,
                                  int host) {
  static struct doctor_finding beyond; /* written to, never read */
  if (diagnosis->count == DOCTOR_MOST_FINDINGS) {
    diagnosis->more++;
    return &beyond;
  }
  struct doctor_finding *finding = &diagnosis->findings[diagnosis->count++];
  *finding = (struct doctor_finding){.kind = kind, .host = host};
  return finding;
}

bool doctor_has(const struct doctor_diagnosis *diagnosis, enum doctor_kind kind, int host) {
  for (int i = 0; i < diagnosis->count; i++)
    if (diagnosis->findings[i].kind == kind && (host < 0 || diagnosis->findings[i].host == host))
      return true;
  return false;
}

void doctor_say(char *text, size_t room, const char *format, ...) {
  size_t used = strlen(text);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + used, room - used, format, arguments);
  va_end(arguments);
}

#define SAY(text, ...) doctor_say(text, sizeof(text), __VA_ARGS__)

/* --- How ranks wait ----------------------------------------------------------------------------*/

/* A scheduler's time slice is a few milliseconds: 4,000 to 9,000 us a hop among twice as many ranks
 * as processors, where 6 us are measured when they yield. Other programs on the same processors add
 * some hundreds, so that less counts only where the cause is plain. */
#define STARVED_MICROSECONDS 2000.0
#define CROWDED_MICROSECONDS 300.0
#define STARVED_RATIO        4.0

/* Of the first rank on the host; the launcher gives all ranks the same. */
static int host_yields(const struct doctor_facts *facts, int host) {
  for (int rank = 0; rank < facts->rank_count; rank++)
    if (facts->ranks[rank].host == host)
      return facts->ranks[rank].yields;
  return -1;
}

static void add_spinning(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis,
                         int host, double hop, const char *among) {
  struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_SPINNING, host);
  int at = host < 0 ? 0 : host, yields = host_yields(facts, at);
  int ranks = facts->hosts[at].ranks, cpus = doctor_host_cpus(facts, at);
  SAY(finding->seen, "a message that goes round %s takes %.0f us a hop", among, hop);
  if (host < 0)
    SAY(finding->seen, ", between two of them while all others sleep %.0f", facts->hop_two);
  SAY(finding->seen, "; %d rank%s on %d CPU%s of %s", ranks, ranks == 1 ? "" : "s", cpus,
      cpus == 1 ? "" : "s", facts->hosts[at].name);
  SAY(finding->why, "ranks that wait keep the processors from those that have work");
  if (yields == 0) {
    SAY(finding->seen, ", mpi_yield_when_idle is off");
    SAY(finding->set, "mpi_yield_when_idle 1, or no more ranks than processors");
    diagnosis->set_yield = true;
  } else
    SAY(finding->set, "no more ranks than processors; see what else runs on the hosts");
}

static double starved_from(const struct doctor_facts *facts, int host) {
  bool plain =
      host_yields(facts, host) == 0 && facts->hosts[host].ranks > doctor_host_cpus(facts, host);
  return plain ? CROWDED_MICROSECONDS : STARVED_MICROSECONDS;
}

static void judge_waiting(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int worst = 0;
  for (int h = 1; h < facts->host_count; h++)
    if (facts->hosts[h].local_hop > facts->hosts[worst].local_hop)
      worst = h;
  if (facts->hosts[worst].local_hop >= starved_from(facts, worst))
    add_spinning(facts, diagnosis, worst, facts->hosts[worst].local_hop, "the ranks of a host");
  else if (facts->hop_all >= STARVED_MICROSECONDS &&
           facts->hop_all >= STARVED_RATIO * facts->hop_two)
    add_spinning(facts, diagnosis, -1, facts->hop_all, "the hosts");
}

/* --- Binding -----------------------------------------------------------------------------------*/

/* How many ranks of the host have exactly this rank's CPUs. */
static int ranks_alike(const struct doctor_facts *facts, int rank) {
  const struct doctor_rank *mine = &facts->ranks[rank];
  int alike = 0;
  for (int r = 0; r < facts->rank_count; r++)
    alike += facts->ranks[r].host == mine->host &&
             memcmp(facts->ranks[r].cpus, mine->cpus, sizeof mine->cpus) == 0;
  return alike;
}

static int first_cpu(const uint64_t *cpus) {
  for (int word = 0; word < DOCTOR_CPU_WORDS; word++)
    if (cpus[word])
      return 64 * word + __builtin_ctzll(cpus[word]);
  return -1;
}

/* Ranks that share CPUs although the host has others that they were not given. One finding: the
 * launcher does the same on every host. */
static void judge_binding(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  for (int r = 0; r < facts->rank_count; r++) {
    const struct doctor_rank *rank = &facts->ranks[r];
    const struct doctor_host *host = &facts->hosts[rank->host];
    int cpus = doctor_cpu_count(rank->cpus), alike = ranks_alike(facts, r);
    if (alike <= cpus || cpus >= host->cpus_online || cpus == 0)
      continue;
    struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_SAME_CPU, rank->host);
    SAY(finding->seen,
        "%s: %d ranks, of which rank %d is one, are bound to %s %d%s; the host has %d", host->name,
        alike, r, cpus == 1 ? "CPU" : "the same CPUs from", first_cpu(rank->cpus),
        cpus == 1 ? "" : " on", host->cpus_online);
    SAY(finding->why, "they take turns on it while other CPUs are idle");
    SAY(finding->set, "do not bind, or bind every rank to a core of its own");
    diagnosis->set_binding = true;
    return;
  }
}

/* --- Streams, MTU ------------------------------------------------------------------------------*/

#define STREAMS_RATIO 1.6

static void judge_streams(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int used = doctor_used_subnet(facts);
  const double *rate = used >= 0 ? facts->subnets[used].rate : NULL;
  bool plain = rate && rate[0] > 0 && rate[DOCTOR_STREAMS - 1] >= STREAMS_RATIO * rate[0];
  bool message = facts->one_stream > 0 && facts->many_streams >= STREAMS_RATIO * facts->one_stream;
  if (!plain && !message)
    return;
  struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_STREAMS_HELP, -1);
  if (plain)
    SAY(finding->seen, "plain TCP: %.2f Gbit/s in one stream, %.2f in four%s", rate[0],
        rate[DOCTOR_STREAMS - 1], message ? "; " : "");
  if (message)
    SAY(finding->seen, "MPI: %.2f Gbit/s from one rank, %.2f from %d ranks at once",
        facts->one_stream, facts->many_streams, facts->message_streams);
  SAY(finding->why,
      "a single connection does not fill the network: a limit of each flow, or delay");
  diagnosis->set_streams = 1 << (DOCTOR_STREAMS - 1);
  SAY(finding->set, "several connections between two hosts; measure again, as not every release of "
                    "Open MPI gains by btl_tcp_links");
}

static int mtu_in(const struct doctor_facts *facts, int host, int subnet) {
  const struct doctor_interface *interface = doctor_interface_in(
      &facts->hosts[host], facts->subnets[subnet].network, facts->subnets[subnet].netmask);
  return interface ? interface->mtu : 0;
}

static void judge_mtu(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  int used = doctor_used_subnet(facts), common = 0, most = 0;
  for (int h = 0; used >= 0 && h < facts->host_count; h++) {
    int alike = 0;
    for (int other = 0; other < facts->host_count; other++)
      alike += mtu_in(facts, other, used) == mtu_in(facts, h, used);
    if (alike > most) {
      most = alike;
      common = mtu_in(facts, h, used);
    }
  }
  for (int h = 0; used >= 0 && h < facts->host_count; h++) {
    int mtu = mtu_in(facts, h, used);
    if (mtu == common)
      continue;
    struct doctor_finding *finding = doctor_add(diagnosis, DOCTOR_MTU, h);
    const char *name = doctor_interface_in(&facts->hosts[h], facts->subnets[used].network,
                                           facts->subnets[used].netmask)
                           ->name;
    SAY(finding->seen, "%s: MTU %d on %s, %d on %d of %d hosts", facts->hosts[h].name, mtu, name,
        common, most, facts->host_count);
    SAY(finding->why, "packets larger than the other side takes are lost without a word where "
                      "nothing on the way says so");
    SAY(finding->set, "on %s: ip link set dev %s mtu %d", facts->hosts[h].name, name, common);
  }
}

void doctor_judge(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis) {
  memset(diagnosis, 0, sizeof *diagnosis);
  diagnosis->set_subnet = -1;
  judge_waiting(facts, diagnosis);
  judge_binding(facts, diagnosis);
  if (facts->host_count < 2)
    return;
  doctor_judge_interfaces(facts, diagnosis);
  /* Rates among ranks that starve each other say nothing of the network. */
  if (!doctor_has(diagnosis, DOCTOR_SPINNING, -1)) {
    doctor_judge_hosts(facts, diagnosis);
    judge_streams(facts, diagnosis);
  }
  judge_mtu(facts, diagnosis);
}
