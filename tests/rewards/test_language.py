"""Languages of one script, told apart by their common words and by profiles: shares by hand, and sentences of each."""

from __future__ import annotations

import pytest

from posttrain.errors import UserError
from posttrain.rewards.language import PROFILED, WORDS, language, share, written_in


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("750 makes 12 then 481 makes 13", "en", 1.0),
        ("750 makes 12 dann 481 macht 13", "en", 1 / 3),
        ("750 makes 12 dann 481 macht 13", "de", 2 / 3),
        ("Macht THEN", "en", 1 / 2),  # whatever the case
        ("so in der summe", "en", 2 / 4),  # `so` and `in` are English too
        ("qwertz makes", "en", 1.0),  # a word of neither list is the script's
        ("dann да", "de", 1 / 2),  # another script is foreign as ever
    ],
)
def test_shares_by_hand(text: str, target: str, expected: float) -> None:
    others = tuple(name for name in WORDS if name != target)
    assert share(text, target, others) == pytest.approx(expected)
    assert language("", text, "", target, others).parts["language"] == pytest.approx(expected)


def test_a_language_without_words_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="fr"):
        share("x", "en", ("fr",))
    with pytest.raises(UserError, match="ru"):
        share("x", "ru", ("en",))


# Sentences and short answers that are not what the profiles were made from.
SENTENCES = {
    "en": """The quick review of the budget shows that costs rose last spring.
    Nobody expected the ferry to arrive two hours ahead of schedule.
    Let x be the price of one ticket; then three tickets cost 3x dollars.
    She carefully folded the map and put it back in her pocket.
    Scientists measured the temperature of the lake every morning in August.
    We subtract 14 from both sides and divide by 3 to get x = 6.
    Heavy rain flooded several roads near the airport yesterday.
    If the train leaves at noon, how far has it travelled by four o'clock?
    My grandfather repairs clocks in a workshop behind the bakery.
    The committee rejected both proposals without further discussion.""",
    "de": """Der Ausschuss lehnte beide Vorschläge ohne weitere Diskussion ab.
    Mein Großvater repariert Uhren in einer Werkstatt hinter der Bäckerei.
    Wir ziehen 14 von beiden Seiten ab und teilen durch 3.
    Starker Regen überflutete gestern mehrere Straßen in der Nähe des Flughafens.
    Niemand hatte erwartet, dass die Fähre zwei Stunden früher ankommt.
    Wissenschaftler maßen im August jeden Morgen die Temperatur des Sees.
    Sie faltete die Karte sorgfältig zusammen und steckte sie wieder ein.
    Sei x der Preis einer Eintrittskarte, dann kosten drei Karten 3x Euro.
    Die Kosten sind im letzten Frühjahr deutlich gestiegen.
    Wenn der Zug mittags abfährt, wie weit ist er dann um vier Uhr?""",
    "fr": """Le comité a rejeté les deux propositions sans autre discussion.
    Mon grand-père répare des horloges dans un atelier derrière la boulangerie.
    Nous soustrayons 14 des deux côtés et divisons par 3.
    De fortes pluies ont inondé plusieurs routes près de l'aéroport.
    Personne ne s'attendait à ce que le ferry arrive avec deux heures d'avance.
    Les scientifiques mesuraient la température du lac tous les matins.
    Elle plia soigneusement la carte et la remit dans sa poche.
    Soit x le prix d'un billet ; trois billets coûtent alors 3x euros.
    Les coûts ont nettement augmenté au printemps dernier.
    Si le train part à midi, quelle distance aura-t-il parcourue à seize heures ?""",
    "es": """El comité rechazó ambas propuestas sin más discusión.
    Mi abuelo repara relojes en un taller detrás de la panadería.
    Restamos 14 de ambos lados y dividimos entre 3.
    Las fuertes lluvias inundaron ayer varias carreteras cerca del aeropuerto.
    Nadie esperaba que el barco llegara dos horas antes de lo previsto.
    Los científicos midieron la temperatura del lago cada mañana de agosto.
    Ella dobló el mapa con cuidado y lo guardó de nuevo en el bolsillo.
    Sea x el precio de una entrada; entonces tres entradas cuestan 3x euros.
    Los costes aumentaron notablemente la primavera pasada.
    Si el tren sale al mediodía, ¿qué distancia habrá recorrido a las cuatro?""",
    "it": """Il comitato ha respinto entrambe le proposte senza ulteriori discussioni.
    Mio nonno ripara orologi in una bottega dietro la panetteria.
    Sottraiamo 14 da entrambi i lati e dividiamo per 3.
    Le forti piogge hanno allagato diverse strade vicino all'aeroporto.
    Nessuno si aspettava che il traghetto arrivasse con due ore di anticipo.
    Gli scienziati misuravano la temperatura del lago ogni mattina di agosto.
    Piegò con cura la mappa e la rimise in tasca.
    Sia x il prezzo di un biglietto; allora tre biglietti costano 3x euro.
    I costi sono aumentati notevolmente la scorsa primavera.
    Se il treno parte a mezzogiorno, quanta strada avrà percorso alle quattro?""",
    "pt": """O comitê rejeitou ambas as propostas sem mais discussão.
    Meu avô conserta relógios em uma oficina atrás da padaria.
    Subtraímos 14 dos dois lados e dividimos por 3.
    As fortes chuvas inundaram ontem várias estradas perto do aeroporto.
    Ninguém esperava que a balsa chegasse duas horas antes do previsto.
    Os cientistas mediram a temperatura do lago todas as manhãs de agosto.
    Ela dobrou o mapa com cuidado e o guardou de novo no bolso.
    Seja x o preço de um bilhete; então três bilhetes custam 3x euros.
    Os custos aumentaram bastante na primavera passada.
    Se o trem sai ao meio-dia, que distância terá percorrido às quatro horas?""",
    "nl": """De commissie verwierp beide voorstellen zonder verdere discussie.
    Mijn grootvader repareert klokken in een werkplaats achter de bakkerij.
    We trekken aan beide kanten 14 af en delen door 3.
    Zware regen zette gisteren meerdere wegen bij de luchthaven onder water.
    Niemand had verwacht dat de veerboot twee uur te vroeg zou aankomen.
    Wetenschappers maten in augustus elke ochtend de temperatuur van het meer.
    Ze vouwde de kaart zorgvuldig op en stopte hem terug in haar zak.
    Stel dat x de prijs van een kaartje is, dan kosten drie kaartjes 3x euro.
    De kosten zijn vorig voorjaar duidelijk gestegen.
    Als de trein om twaalf uur vertrekt, hoe ver is hij dan om vier uur?""",
}
SHORT = {
    "en": """Yes, of course.
    The answer is seven.
    Thank you very much!
    So we are done.""",
    "de": """Ja, natürlich.
    Die Antwort ist sieben.
    Vielen Dank!
    Also sind wir fertig.""",
    "fr": """Oui, bien sûr.
    La réponse est sept.
    Merci beaucoup !
    Donc c'est fini.""",
    "es": """Sí, por supuesto.
    La respuesta es siete.
    ¡Muchas gracias!
    Ya hemos terminado.""",
    "it": """Sì, certamente.
    La risposta è sette.
    Grazie mille!
    Allora abbiamo finito.""",
    "pt": """Sim, com certeza.
    A resposta é sete.
    Muito obrigado!
    Então terminamos.""",
    "nl": """Ja, natuurlijk.
    Het antwoord is zeven.
    Dank je wel!
    Dus we zijn klaar.""",
}
LATIN = [(spoken, text.strip()) for spoken, texts in SENTENCES.items() for text in texts.split("\n")]


@pytest.mark.parametrize(("spoken", "text"), LATIN)
def test_a_sentence_scores_1_in_its_own_language(spoken: str, text: str) -> None:
    assert share(text, spoken) == 1.0


def test_sentences_score_next_to_nothing_in_another_language() -> None:
    for target in PROFILED:
        foreign = [share(text, target) for spoken, text in LATIN if spoken != target]
        assert sum(foreign) / len(foreign) < 0.05, target


def test_a_short_answer_scores_best_in_its_own_language() -> None:
    for spoken, texts in SHORT.items():
        for text in texts.split("\n"):
            assert share(text, spoken) == 1.0, text
        together = texts.replace("\n", " ")
        assert max(share(together, other) for other in PROFILED if other != spoken) < 0.3


@pytest.mark.parametrize(
    "text",
    [
        "Okay, so I need the area of triangle ABC with AB = 5. Hmm, wait, let me recompute using the law of cosines.",
        "Pierre and Jean visited the Louvre in Paris before returning to Toulouse.",
        "Sum modulo prime: lambda, sigma, theta, alpha, gamma",
        "The chef recommended a crème brûlée.",
        "Asymptotic Kullback-Leibler divergence estimator variance",
    ],
)
def test_names_terms_and_loan_words_are_no_other_language(text: str) -> None:
    assert share(text, "en") == 1.0


def test_a_response_in_two_languages_has_the_share_of_each() -> None:
    text = "First, add the numbers. Dann multiplizieren wir das Ergebnis mit vier. Finally, divide by two."
    assert share(text, "en") == pytest.approx(8 / 15)
    assert share(text, "de") == pytest.approx(7 / 15)


def test_chinese_is_not_japanese_nor_the_reverse() -> None:
    assert share("東京は日本の首都です。", "ja") == 1.0 and share("東京は日本の首都です。", "zh") == 0.0
    assert share("北京是中国的首都。", "zh") == 1.0 and share("北京是中国的首都。", "ja") == 0.0


def test_latin_as_a_target_is_any_language_of_the_script() -> None:
    assert share("makes dann macht", "latin") == 1.0


TEXTS = {
    "ar": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق، وهم قد وهبوا عقلا، وعليهم أن يعامل بعضهم بعضا على هذا.",
    "bg": "Всички хора се раждат свободни и равни по достойнство и права. Те са надарени с разум и трябва да се отнасят като братя.",
    "bn": "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে।",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft begabt.",
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón, deben ser así.",
    "fa": "تمام افراد بشر آزاد به دنیا می آیند و از لحاظ حیثیت و حقوق با هم برابر هستند و این برای آن است که با هم رفتار کنند.",
    "fi": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina. Heille on annettu järki, ja se on hyvä, mutta se ei riitä.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et doivent agir ainsi.",
    "gu": "પ્રતિષ્ઠા અને અધિકારોની દૃષ્ટિએ સર્વ માનવો જન્મથી સ્વતંત્ર અને સમાન હોય છે.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्म से स्वतंत्रता और समानता मिली है। उन्हें बुद्धि की देन भी है।",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione e devono agire così.",
    "kn": "ಎಲ್ಲಾ ಮಾನವರೂ ಸ್ವತಂತ್ರರಾಗಿಯೇ ಜನಿಸಿದ್ದಾರೆ.",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "mr": "सर्व मानवी व्यक्ती जन्मतः स्वतंत्र आहेत आणि त्यांना समान प्रतिष्ठा आहे. पण हे खूप मोठे आहे.",
    "ne": "सबै व्यक्तिहरू जन्मजात स्वतन्त्र हुन् र तिनीहरूको समान अधिकार छ। यो पनि राम्रो कुरा हो, तर धेरै छैन।",
    "pa": "ਸਾਰਾ ਮਨੁੱਖੀ ਪਰਿਵਾਰ ਆਪਣੀ ਮਹਿਮਾ ਅਤੇ ਹੱਕਾਂ ਦੇ ਪੱਖੋਂ ਜਨਮ ਤੋਂ ਹੀ ਆਜ਼ਾਦ ਹੈ।",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão, devem agir assim com os outros.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом, и это не все, что у них есть.",
    "sw": "Watu wote wamezaliwa huru, hadhi na haki zao ni sawa. Wote wamejaliwa akili, hivyo lazima wawe kama ndugu katika dunia.",
    "ta": "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்.",
    "te": "ప్రతిపత్తిస్వత్వముల విషయమున మానవులెల్లరును జన్మతః స్వతంత్రులును సమానులును నగుదురు.",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "ur": "تمام انسان آزاد اور حقوق و عزت کے اعتبار سے برابر پیدا ہوئے ہیں۔ انہیں ضمیر اور عقل ملی ہے اور یہ ایک نعمت ہے۔",
    "vi": "Tất cả mọi người sinh ra đều được tự do và bình đẳng. Mọi người đều có lý trí và cần phải đối xử với nhau như anh em.",
}


@pytest.mark.parametrize("language", TEXTS)
def test_a_text_is_written_in_its_own_language_alone(language: str) -> None:
    assert [name for name in TEXTS if written_in(TEXTS[language], name)] == [language]
    capital = TEXTS[language].upper()
    assert written_in(capital, language)


def test_a_text_without_letters_is_of_any_language_and_an_unknown_one_is_refused() -> None:
    assert written_in("12 + 3 = 15", "sw") and written_in("", "en")
    assert written_in("这是一个问题", "zh") and not written_in("これは問題です", "zh") and written_in("これは問題です", "ja")
    with pytest.raises(UserError, match="unknown language 'tlh'"):
        written_in("", "tlh")
