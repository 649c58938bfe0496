CREATE TABLE state(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE events(id INTEGER PRIMARY KEY, record TEXT);
CREATE TABLE stages(id INTEGER PRIMARY KEY, name TEXT UNIQUE, first REAL, last REAL, step INTEGER);
CREATE TABLE series(id INTEGER PRIMARY KEY, stage TEXT, figure TEXT, UNIQUE(stage, figure));
CREATE TABLE points(series INTEGER, step INTEGER, attempt INTEGER, time REAL, value REAL, PRIMARY KEY(series, step)) WITHOUT ROWID;
CREATE TABLE files(stage TEXT, step INTEGER, changed INTEGER, bytes INTEGER, PRIMARY KEY(stage, step)) WITHOUT ROWID;
CREATE TABLE rollouts(
  id INTEGER PRIMARY KEY AUTOINCREMENT, stage TEXT, step INTEGER, number INTEGER, start INTEGER, bytes INTEGER, problem TEXT,
  level INTEGER, sample INTEGER, role TEXT, question TEXT, reward REAL, parts TEXT, outcome TEXT, failure TEXT, finish TEXT,
  length INTEGER, turns INTEGER, advantage REAL, attempt INTEGER);
CREATE INDEX rollouts_place ON rollouts(stage, step, number);
CREATE INDEX rollouts_problem ON rollouts(problem, step);
CREATE INDEX rollouts_reward ON rollouts(reward);
CREATE VIRTUAL TABLE words USING fts5(text, content='', detail=none);
INSERT INTO words(words, rank) VALUES('hashsize', 33554432);
