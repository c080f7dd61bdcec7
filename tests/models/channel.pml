/* A channel of weights, for the model checker Spin: `make models`.

Participants 0 to S-1 subscribe, and the PUBS after them publish: a publisher may die, and another
one then takes its place. A version has a number, bytes (1: those of the first
publisher, 2: those of the second) and an id, which is that of its publisher. It comes in two parts.
A publisher begins with any number, and each version is higher than the one it published before.

Participants share records at the coordinator: which versions there are, who publishes, who has given
a sign of life, and the line of each version. A restart of the coordinator forgets all of these. With
DURABLE it remembers which version was published last. KILLS, RESTARTS and DAMAGES (parts that come
damaged) say how often something fails. With DELTAS, publishers have differences between versions.

Spin tries every order of all steps. An assertion fails if a guarantee is broken. When no step is
left, no living subscriber may lack a version that a living participant could give it. Each FAULT_…
leaves one rule out.

Abstractions: each step on the records is atomic, because participants change them by compare and
set. A participant that polls acts only if it finds something. Not modelled: shares and slices,
memory of the host that others map, the source of the last version that is asked first, chains of
more than one difference, differences that are forwarded while they come, and time. Without DURABLE,
all living participants are back before a publisher enters. */

#define BIT(i) (1 << (i))
#define HAS(mask, i) (((mask) >> (i)) & 1)
#define Q (S + PUBS)
#define AT(q, v) ((q) * (V + 1) + (v))
#define KEEP 2
#define DAMAGED 3

mtype = { AWAY, PUBLISHES, ANNOUNCES, OVER };

/* The records. 0: there is none. */
byte release[V + 1], release_id[V + 1];
byte seat;                       /* the publisher, plus 1 */
byte there;                      /* who has given a sign of life */
byte position[S * (V + 1)];      /* in the line of a version, from 1 on */
byte published, published_bytes; /* what was published last */

byte alive = BIT(Q) - 1;
byte kills, restarts, damages;
bool is_calm;                    /* nothing fails any more */

/* What participants have of each version. */
byte bytes[Q * (V + 1)], id[Q * (V + 1)];          /* of the release that is here, or coming */
byte filled[Q * (V + 1)];                          /* how many parts are here */
byte first[Q * (V + 1)], second[Q * (V + 1)];      /* which bytes the two parts are of */
byte base_of[Q * (V + 1)];                         /* the base of the difference that is here */

/* Subscribers. */
byte wants[S], source[S], failed[S], starved;      /* `source`: plus 1 */
byte base[S];                    /* the version to which the differences of the source apply */
byte given[S];                   /* the newest version that the program was given */
byte got[S * (V + 1)];           /* the bytes of each version that it was given */

/* Publishers. */
mtype doing[PUBS];
byte before[PUBS], before_bytes[PUBS], last[PUBS], going[PUBS];
byte fresh;                      /* who has kept its place lately */

byte k;                          /* a counter; 0 between steps */

#if PUBS == 1 && S == 2
#define ANY(E, s, v) (E(0, s, v) || E(1, s, v) || E(2, s, v))
#elif (PUBS == 1 && S == 3) || (PUBS == 2 && S == 2)
#define ANY(E, s, v) (E(0, s, v) || E(1, s, v) || E(2, s, v) || E(3, s, v))
#else
#define ANY(E, s, v) (E(0, s, v) || E(1, s, v) || E(2, s, v) || E(3, s, v) || E(4, s, v))
#endif
#if V == 1
#define ANY_VERSION(E, s) (E(s, 1))
#define NEWEST (release[1] -> 1 : 0)
#elif V == 2
#define ANY_VERSION(E, s) (E(s, 1) || E(s, 2))
#define NEWEST (release[2] -> 2 : (release[1] -> 1 : 0))
#else
#define ANY_VERSION(E, s) (E(s, 1) || E(s, 2) || E(s, 3))
#define NEWEST (release[3] -> 3 : (release[2] -> 2 : (release[1] -> 1 : 0)))
#endif

/* A publisher whose place another one has gives nothing any more. */
#define GIVES(q) (HAS(alive, q) && ((q) < S || seat == 0 || seat == (q) + 1))

/* Whether one of its versions is missing in the records, and none there is newer. */
#ifdef FAULT_NOT_TOLD_AGAIN
#define IS_MISSING(q, v) false
#else
#define IS_MISSING(q, v) (bytes[AT(q, v)] && filled[AT(q, v)] == 2 && \
                          release[v] != bytes[AT(q, v)] && (v) >= NEWEST)
#endif
#define HAS_TO_TELL(q) ANY_VERSION(IS_MISSING, q)

inline note_published() {
  if
  :: NEWEST && NEWEST >= published -> published = NEWEST; published_bytes = release[published]
  :: else
  fi
}

inline tell_again(q) {
  k = 1;
  do
  :: k <= V ->
     if
     :: bytes[AT(q, k)] && filled[AT(q, k)] == 2 && release[k] != bytes[AT(q, k)] ->
        release[k] = bytes[AT(q, k)]; release_id[k] = id[AT(q, k)]
     :: else
     fi;
     k++
  :: else -> break
  od;
  k = 0;
  note_published()
}

inline drop(q, v) {
  bytes[AT(q, v)] = 0; id[AT(q, v)] = 0; filled[AT(q, v)] = 0;
  first[AT(q, v)] = 0; second[AT(q, v)] = 0; base_of[AT(q, v)] = 0
}

/* Subscribers. */

#ifdef FAULT_OLDER_GIVEN
#define IS_WANTED(s, v) (release[v] && got[AT(s, v)] != release[v])
#else
#define IS_WANTED(s, v) (release[v] && ((v) > given[s] || ((v) == given[s] && got[AT(s, v)] != release[v])))
#endif

/* Whether q has more of what is listed as version v than s has. */
#define CAN_GIVE(q, s, v) ((q) != s && GIVES(q) && bytes[AT(q, v)] == release[v] && filled[AT(q, v)] && \
                           (bytes[AT(s, v)] != release[v] || filled[AT(q, v)] > filled[AT(s, v)]))
#define HAS_MORE(q, s, v) (bytes[AT(q, v)] && filled[AT(q, v)] > filled[AT(s, v)])

#ifdef FAULT_TAKES_FROM_BEHIND
#define IS_BEFORE(q, s, v) (position[AT(q, v)] != 0)
#else
#define IS_BEFORE(q, s, v) (position[AT(q, v)] != 0 && position[AT(q, v)] < position[AT(s, v)])
#endif
#define MAY_TAKE(q, s, v) ((q) != s && !HAS(failed[s], q) && HAS(there, q) && \
                           ((q) >= S -> seat == (q) + 1 : IS_BEFORE((q) % S, s, v)))
#ifdef FAULT_STAYS_IN_LINE
#define HELPS_FROM_BEHIND(q, s, v) false
#else
#define HELPS_FROM_BEHIND(q, s, v) ((q) < S && (q) != s && !HAS(failed[s], q) && HAS(there, q) && \
                                    position[AT((q) % S, v)] > position[AT(s, v)] && HAS_MORE(q, s, v))
#endif
#define COULD_NOW(q, s, v) (HAS(failed[s], q) && GIVES(q) && HAS(there, q) && \
                            bytes[AT(q, v)] == bytes[AT(s, v)] && HAS_MORE(q, s, v))

#define IS_OFFERED(s, v) (IS_WANTED(s, v) && ANY(CAN_GIVE, s, v))
#define ANOTHER(s, v) ((v) != wants[s] && IS_OFFERED(s, v))

#ifdef FAULT_NOT_LISTED_AGAIN
#define MUST_LIST(s, v) false
#else
#define MUST_LIST(s, v) ((v) && bytes[AT(s, v)] && filled[AT(s, v)] == 2 && position[AT(s, v)] == 0)
#endif

inline leave_receivers(s) {
  k = 0;
  do
  :: k < S -> if :: source[k] == s + 1 -> source[k] = 0; base[k] = 0; failed[k] = failed[k] | BIT(s) :: else fi; k++
  :: else -> break
  od;
  k = 0
}

inline want_none(s) {
  wants[s] = 0; source[s] = 0; base[s] = 0; failed[s] = 0; starved = starved & ~BIT(s)
}

inline begin(s, v) {
  wants[s] = v;
  if
  :: bytes[AT(s, v)] != release[v] -> drop(s, v)
  :: else
  fi;
  bytes[AT(s, v)] = release[v]; id[AT(s, v)] = release_id[v]
}

inline to_end(s, v) {
  k = 0;
  do
  :: k < S ->
     if
     :: k != s && position[AT(s, v)] && position[AT(k, v)] > position[AT(s, v)] -> position[AT(k, v)]--
     :: else
     fi;
     k++
  :: else -> break
  od;
  position[AT(s, v)] = 0;
  k = 0;
  do
  :: k < S -> position[AT(s, v)] = (k != s && position[AT(k, v)] > position[AT(s, v)] -> position[AT(k, v)] : position[AT(s, v)]); k++
  :: else -> break
  od;
  position[AT(s, v)]++;
  k = 0
}

inline take_from(s, q, v) {
  source[s] = q + 1; starved = starved & ~BIT(s);
#ifdef DELTAS
  k = v - 1;  /* the newest version here that is whole and older */
  do
  :: k > 0 && !(bytes[AT(s, k)] && filled[AT(s, k)] == 2) -> k--
  :: else -> break
  od;
  if
#ifdef FAULT_ANY_BASE
  :: k && base_of[AT(q, v)] -> base[s] = k
#else
  :: k && base_of[AT(q, v)] == k && id[AT(q, v)] == id[AT(s, k)] && id[AT(q, v)] == id[AT(s, v)] -> base[s] = k
#endif
  :: else
  fi;
  k = 0
#endif
}

inline take_part(s, q, v) {
  c = (filled[AT(s, v)] == 0 -> first[AT(q, v)] : second[AT(q, v)]);
  if
  :: base[s] -> /* A difference is applied to its base alone. */
     assert(base_of[AT(q, v)] == base[s] && id[AT(q, v)] == id[AT(s, base[s])])
  :: else
  fi;
  if
  :: true
  :: damages < DAMAGES && !is_calm -> damages++; c = DAMAGED
  fi;
  if
#ifndef FAULT_NOT_CHECKED
  :: c != bytes[AT(s, v)] -> failed[s] = failed[s] | BIT(q); source[s] = 0; base[s] = 0
#endif
  :: else ->
     if :: filled[AT(s, v)] == 0 -> first[AT(s, v)] = c :: else -> second[AT(s, v)] = c fi;
     filled[AT(s, v)]++;
     if :: base[s] && filled[AT(s, v)] == 2 -> base_of[AT(s, v)] = base[s] :: else fi
  fi;
  c = 0
}

inline give(s, v) {
  c = bytes[AT(s, v)];
  assert(first[AT(s, v)] == c && second[AT(s, v)] == c);  /* whole, of one version, undamaged */
  assert(v >= given[s]);                                  /* versions only grow */
  k = 0;
  do  /* A version has the same bytes at all that live. */
  :: k < S -> assert(!HAS(alive, k) || got[AT(k, v)] == 0 || got[AT(k, v)] == c); k++
  :: else -> break
  od;
  given[s] = v; got[AT(s, v)] = c;
  k = 1;
  do
  :: k < v -> drop(s, k); k++
  :: else -> break
  od;
  k = 0; c = 0;
  want_none(s)
}

#ifdef FAULT_KEEPS_RECEIVERS
#define HAS_NO_SOURCE(q) false
#else
#define HAS_NO_SOURCE(q) HAS(starved, q)
#endif
#define IS_REFUSED(q) (!GIVES(q) || bytes[AT(q, v)] == 0 || (!HAS_MORE(q, s, v) && filled[AT(q, v)] < 2 && \
                       ((q) >= S || wants[(q) % S] != v || HAS_NO_SOURCE(q))))
#define LIVES HAS(alive, s)
#define LOOKS (LIVES && wants[s] && source[s] == 0)

#define PICKS(w) :: atomic { LIVES && wants[s] == 0 && IS_OFFERED(s, w) -> begin(s, w); v = w; if :: position[AT(s, v)] == 0 -> to_end(s, v) :: else fi }
#define CHOOSES(q) :: atomic { LOOKS && position[AT(s, v)] && filled[AT(s, v)] < 2 && MAY_TAKE(q, s, v) -> take_from(s, q, v) }

proctype subscriber(byte s) {
  byte v, c;
end:
  do
  PICKS(1)
#if V > 1
  PICKS(2)
#endif
#if V > 2
  PICKS(3)
#endif
  CHOOSES(0)
  CHOOSES(1)
  CHOOSES(2)
#if Q > 3
  CHOOSES(3)
#endif
#if Q > 4
  CHOOSES(4)
#endif
  /* gives a sign of life */
  :: atomic { LIVES && (!HAS(there, s) || HAS_TO_TELL(s)) ->
       there = there | BIT(s); if :: HAS_TO_TELL(s) -> tell_again(s) :: else fi }
  /* lists what it has again, because the line was forgotten */
  :: atomic { LIVES && MUST_LIST(s, given[s]) -> to_end(s, given[s]) }
  /* stands in line again, because the line was forgotten */
  :: atomic { LOOKS && position[AT(s, v)] == 0 -> to_end(s, v) }
  :: atomic { LIVES && source[s] && GIVES(source[s] - 1) && HAS_MORE(source[s] - 1, s, v) -> take_part(s, (source[s] - 1), v) }
  :: atomic { LIVES && source[s] && IS_REFUSED(source[s] - 1) -> failed[s] = failed[s] | BIT(source[s] - 1); source[s] = 0; base[s] = 0 }
  :: atomic { LIVES && wants[s] && filled[AT(s, v)] == 2 -> give(s, v); v = 0 }
  /* finds no source */
  :: atomic { LOOKS && position[AT(s, v)] && filled[AT(s, v)] < 2 && !ANY(MAY_TAKE, s, v) && (!HAS(starved, s) || ANY(HELPS_FROM_BEHIND, s, v)) ->
       starved = starved | BIT(s);
#ifndef FAULT_KEEPS_RECEIVERS
       leave_receivers(s);
#endif
       if :: ANY(HELPS_FROM_BEHIND, s, v) -> to_end(s, v) :: else fi }
  /* looks again */
  :: atomic { LOOKS && HAS(starved, s) && ANY(COULD_NOW, s, v) -> failed[s] = 0; starved = starved & ~BIT(s) }
  /* newer versions have replaced this one, or another one can be had */
  :: atomic { LOOKS && filled[AT(s, v)] < 2 && ((release[v] != bytes[AT(s, v)] && NEWEST >= v) || (HAS(starved, s) && ANY_VERSION(ANOTHER, s))) ->
       leave_receivers(s); want_none(s); v = 0 }
  od
}

/* Publishers. */

#define ME (S + p)
#define OTHER (S + 1 - p)
#define IS_FREE (seat == 0 || !HAS(there, seat - 1))

#define IS_BACK(q, s, v) (!HAS(alive, q) || ((q) >= S && doing[((q) - S) % PUBS] == AWAY) || (HAS(there, q) && !HAS_TO_TELL(q)))
#ifdef DURABLE
/* It waits until another one could have listed itself again. */
#define MAY_ENTER (IS_FREE && (seat || !restarts || !(fresh & alive & ~BIT(ME))))
#else
#define ALL_ARE_BACK (IS_BACK(0, 0, 0) && IS_BACK(1, 0, 0) && IS_BACK(2, 0, 0) && (Q < 4 || IS_BACK(3 % Q, 0, 0)) && (Q < 5 || IS_BACK(4 % Q, 0, 0)))
#define MAY_ENTER (IS_FREE && ALL_ARE_BACK)
#endif

#ifdef FAULT_SEAT_NOT_KEPT
#define TAKES_EMPTY_SEAT false
#else
#define TAKES_EMPTY_SEAT (seat == 0)
#endif

#define IS_IN (HAS(alive, ME) && (doing[p] == PUBLISHES || doing[p] == ANNOUNCES))
#define IS_HIGHER(w) ((w) > before[p] && (w) > NEWEST)
#define IS_AGAIN(w, c) ((release[w] == (c)) || (before[p] == (w) && before_bytes[p] == (c)))

inline prepare(w, c) {
  bytes[AT(ME, w)] = c; id[AT(ME, w)] = p + 1; filled[AT(ME, w)] = 2;
  first[AT(ME, w)] = c; second[AT(ME, w)] = c;
  going[p] = w; doing[p] = ANNOUNCES
}

inline announce(w) {
  if
#ifdef FAULT_NUMBERS_NOT_COMPARED
  :: true ->
#else
  :: IS_HIGHER(w) || IS_AGAIN(w, bytes[AT(ME, w)]) ->
#endif
     release[w] = bytes[AT(ME, w)]; release_id[w] = p + 1;
#if V > KEEP
     if :: release[3] && release[2] -> release[1] = 0; release_id[1] = 0 :: else fi;
#endif
     note_published();
     k = 1;
     do
     :: k <= V -> if :: release[k] == 0 && k != w -> drop(ME, k) :: else fi; k++
     :: else -> break
     od;
     k = 0;
#ifdef DELTAS
     if :: last[p] && bytes[AT(ME, last[p])] -> base_of[AT(ME, w)] = last[p] :: else fi
#endif
  :: else -> drop(ME, w)
  fi;
  last[p] = w; going[p] = 0; doing[p] = PUBLISHES
}

#define TRIES(w, c) :: atomic { HAS(alive, ME) && doing[p] == PUBLISHES && w > last[p] && !is_calm && \
    (HAS(fresh, ME) || seat == ME + 1) && (MAY_TRY(w) || IS_AGAIN(w, c)) -> prepare(w, c) }
#ifdef FAULT_NUMBERS_NOT_COMPARED
#define MAY_TRY(w) true
#else
#define MAY_TRY(w) IS_HIGHER(w)
#endif

proctype publisher(byte p) {
end:
  do
  :: atomic { HAS(alive, ME) && doing[p] == AWAY && !is_calm && (p == 0 || doing[0] != AWAY) && MAY_ENTER ->
       seat = ME + 1; there = there | BIT(ME);
       before[p] = published; before_bytes[p] = published_bytes;
       doing[p] = PUBLISHES }
  TRIES(1, p + 1)
#if V > 1
  TRIES(2, p + 1)
#endif
#if V > 2
  TRIES(3, p + 1)
#endif
#if PUBS > 1
  /* the same bytes as the other one's, as after a crash */
  TRIES(1, 2 - p)
#if V > 1
  TRIES(2, 2 - p)
#endif
#endif
  :: atomic { HAS(alive, ME) && doing[p] == ANNOUNCES -> announce(going[p]) }
  /* gives a sign of life */
  :: atomic { IS_IN && (!HAS(there, ME) || TAKES_EMPTY_SEAT || (seat == ME + 1 && !HAS(fresh, ME)) || HAS_TO_TELL(ME)) ->
       there = there | BIT(ME);
       if :: TAKES_EMPTY_SEAT -> seat = ME + 1 :: else fi;
       if :: seat == ME + 1 -> fresh = fresh | BIT(ME) :: else fi;
       if :: HAS_TO_TELL(ME) -> tell_again(ME) :: else fi }
  /* its place is taken: it ends */
  :: atomic { HAS(alive, ME) && doing[p] == PUBLISHES && !HAS(fresh, ME) && seat && seat != ME + 1 -> alive = alive & ~BIT(ME); doing[p] = OVER }
  od
}

/* What fails, and when it does not any more. */

#define DIES(q) :: atomic { !is_calm && kills < KILLS && HAS(alive, q) && ((q) < S || doing[((q) - S) % PUBS] != AWAY) -> kills++; alive = alive & ~BIT(q); if :: (q) < S -> there = there & ~BIT(q) :: else fi }
#define EXPIRES(q) :: atomic { HAS(there, q) && !HAS(alive, q) -> there = there & ~BIT(q) }

proctype world() {
end:
  do
  :: atomic { !is_calm -> is_calm = true }
  :: atomic { !is_calm && restarts < RESTARTS ->
       restarts++; seat = 0; there = 0;
       k = 1;
       do :: k <= V -> release[k] = 0; release_id[k] = 0; k++ :: else -> break od;
       k = 0;
       do :: k < S * (V + 1) -> position[k] = 0; k++ :: else -> break od;
       k = 0;
#ifndef DURABLE
       published = 0; published_bytes = 0
#endif
     }
  DIES(0)
  DIES(1)
  DIES(2)
#if Q > 3
  DIES(3)
#endif
#if Q > 4
  DIES(4)
#endif
  EXPIRES(S)
#if PUBS > 1
  EXPIRES(S + 1)
#endif
  od
}

/* No living subscriber lacks a version that it could be given. */
#define IS_HELD(q, s, v) (GIVES(q) && bytes[AT(q, v)] && filled[AT(q, v)] == 2)
#define LACKS(s, v) ((v) > given[s] && ANY(IS_HELD, s, v))

init {
  atomic {
    k = 0;
    do :: k < PUBS -> doing[k] = AWAY; k++ :: else -> break od;
    k = 0;
    run subscriber(0); run subscriber(1);
#if S > 2
    run subscriber(2);
#endif
    run publisher(0);
#if PUBS > 1
    run publisher(1);
#endif
    run world()
  };
  atomic {
    timeout;
    do
    :: k < S -> assert(!HAS(alive, k) || !ANY_VERSION(LACKS, k)); k++
    :: else -> break
    od
  }
}
