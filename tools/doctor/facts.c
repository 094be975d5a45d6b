/* Derives subnets, processors and noise from the doctor's facts. */
#include <math.h>
#include <stdlib.h>

#include "tools/doctor/doctor.h"
#include "tools/tune/tune.h"

bool doctor_in_network(const struct doctor_interface *one, uint32_t address, uint32_t netmask) {
  return one->netmask == netmask && ((one->address ^ address) & netmask) == 0;
}

const struct doctor_interface *doctor_interface_in(const struct doctor_facts *facts, int host,
                                                   int subnet) {
  const struct doctor_subnet *in = &facts->subnets[subnet];
  const struct doctor_host *the = &facts->hosts[host];
  for (int i = 0; i < the->interface_count; i++)
    if (the->interfaces[i].up && doctor_in_network(&the->interfaces[i], in->network, in->netmask))
      return &the->interfaces[i];
  return NULL;
}

/* True if every host has an address in the candidate's subnet, each another one. */
static bool is_shared(const struct doctor_facts *facts, int candidate) {
  for (int h = 0; h < facts->host_count; h++) {
    const struct doctor_interface *mine = doctor_interface_in(facts, h, candidate);
    for (int other = 0; mine && other < h; other++)
      if (doctor_interface_in(facts, other, candidate)->address == mine->address)
        return false;
    if (!mine)
      return false;
  }
  return true;
}

void doctor_find_subnets(struct doctor_facts *facts) {
  const struct doctor_host *first = &facts->hosts[0];
  facts->subnet_count = 0;
  for (int i = 0; i < first->interface_count && facts->subnet_count < DOCTOR_SUBNETS; i++) {
    const struct doctor_interface *one = &first->interfaces[i];
    facts->subnets[facts->subnet_count] =
        (struct doctor_subnet){.network = one->address & one->netmask, .netmask = one->netmask};
    facts->subnet_count += doctor_interface_in(facts, 0, facts->subnet_count) == one &&
                           is_shared(facts, facts->subnet_count);
  }
}

double doctor_part_of(const struct doctor_facts *facts, int host, int subnet) {
  double there = 0, all = 0;
  for (int h = 0; h < facts->host_count; h++) {
    uint64_t sent = 0;
    for (int i = 0; i < facts->hosts[h].interface_count; i++)
      sent += facts->hosts[h].interfaces[i].sent;
    if (facts->bulk == 0 || sent < facts->bulk / 2 || (host >= 0 && host != h))
      continue; /* what else is sent is a trickle */
    all += (double)sent;
    there += (double)doctor_interface_in(facts, h, subnet)->sent;
  }
  return all > 0 ? there / all : 0;
}

int doctor_used_subnet(const struct doctor_facts *facts) {
  int best = -1;
  for (int s = 0; s < facts->subnet_count; s++)
    if (doctor_part_of(facts, -1, s) > (best < 0 ? 0 : doctor_part_of(facts, -1, best)))
      best = s;
  return best;
}

int doctor_count_cpus(const uint64_t *cpus) {
  int count = 0;
  for (int word = 0; word < DOCTOR_CPU_TEXT; word++)
    count += __builtin_popcountll(cpus[word]);
  return count;
}

int doctor_host_cpus(const struct doctor_facts *facts, int host) {
  uint64_t all[DOCTOR_CPU_TEXT] = {0};
  for (int r = 0; r < facts->rank_count; r++)
    for (int word = 0; facts->ranks[r].host == host && word < DOCTOR_CPU_TEXT; word++)
      all[word] |= facts->ranks[r].cpus[word];
  return doctor_count_cpus(all);
}

/* Sorts the values. The better of the two middle values: when half of the hosts are slow, they are
 * the fault, and when two numbers differ, the spread of the good half is the noise. */
static double find_good_median(double *values, int count, bool low_is_bad) {
  tune_median(values, count); /* sorts them */
  return values[low_is_bad ? count / 2 : (count - 1) / 2];
}

/* A normal distribution's standard deviation is 1.4826 median absolute deviations; four of them are
 * beyond noise for any number of hosts that a table shows. */
bool doctor_outlier(double value, const double *values, int count, double ratio, bool low_is_bad) {
  double *copy = malloc((size_t)(count + 1) * sizeof *copy);
  int used = 0;
  bool far = false;
  for (int i = 0; copy && i < count; i++)
    if (values[i] > 0)
      copy[used++] = values[i];
  if (used >= 3 && value > 0) {
    double median = find_good_median(copy, used, low_is_bad);
    for (int i = 0; i < used; i++)
      copy[i] = fabs(copy[i] - median);
    double noise = 4 * 1.4826 * find_good_median(copy, used, false);
    far = low_is_bad ? value * ratio <= median && median - value > noise
                     : value >= median * ratio && value - median > noise;
  }
  free(copy);
  return far;
}
